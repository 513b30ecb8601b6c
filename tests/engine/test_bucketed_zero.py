"""ZeRO 1 and 2 in buckets, against DeepSpeed's own reductions and gathers to the bit, and against plain PyTorch."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bucketed_lives import LIVES, MICRO, PLAIN, WIDTH, Life, Stack, batch, groups_of, steps
from ranks import run_on_ranks
from wire import Wire

from ds_npu.parallel.tensor.awaited_weights import AwaitedWeight
from ds_npu.zero_ext import partition_exchange
from ds_npu.zero_ext.bucketed_zero import BUCKETED, why_not_bucketed


def second_engines() -> None:
    """Another engine of a model whose first engine is still there, whose hooks its weights keep, is that of a copy."""
    for stage, accumulation in ((1, 1), (1, 2), (2, 1), (2, 2)):
        life = Life(steps, stage=stage, accumulation=accumulation)
        first = life.engine({})
        steps(first)
        copied = copy.deepcopy(first.module)
        found = [steps(life.engine_of(model, {}), 3, first=2) for model in (copied, first.module)]
        same(found[1], found[0], (stage, accumulation))


def test_a_second_engine_of_a_model():
    run_on_ranks(2, second_engines)


KINDS = {"buckets": {}, "plain": PLAIN}
"""Who writes or reads a checkpoint: what it adds to ``zero_optimization``."""


def compare(name: str) -> None:
    """On two ranks, whose sums have one order."""
    life = LIVES[name]
    plain, bucketed = life.engine(PLAIN), life.engine({})
    assert BUCKETED.get(plain.optimizer) is None
    assert len(BUCKETED.get(bucketed.optimizer).gradients._order) > 3
    expected, found = life.live(plain), life.live(bucketed)
    assert len(found) == len(expected) > 10
    for index, (each, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(each.nan_to_num(), other.nan_to_num()), (name, index, each, other)


def compare_all() -> None:
    for name in LIVES:
        compare(name)


def test_a_life_in_buckets_is_deepspeeds_to_the_bit():
    run_on_ranks(2, compare_all)


def checkpoints(folder: str) -> None:
    """A checkpoint of buckets is DeepSpeed's: what either has written either resumes to the bit, states and all."""
    for life, window in ((Life(steps), 50), (Life(steps, stage=2, dtype=torch.bfloat16), 10**6)):
        partition_exchange.WINDOW = window
        for writer, zero in KINDS.items():
            engine, tag = life.engine(zero), f"{life.stage} {writer}"
            steps(engine)
            engine.save_checkpoint(folder, tag=tag)
            expected = steps(engine, first=2)
            for reader in KINDS.values():
                other = life.engine(reader, seed=1)
                other.load_checkpoint(folder, tag=tag)
                same(steps(other, first=2), expected, (life.stage, zero, reader))


def same(found: list[torch.Tensor], expected: list[torch.Tensor], where: object) -> None:
    assert len(found) == len(expected)
    for index, (each, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(each, other), (where, index)


def test_checkpoints_are_deepspeeds(tmp_path):
    run_on_ranks(2, checkpoints, str(tmp_path))


def mean_of_ranks(step: int, micros: int, ranks: int) -> list[tuple[torch.Tensor, bool]]:
    """All ranks' micro-batches, and whether each uses the spare layer: on some ranks, in some steps."""
    found = []
    for rank in range(ranks):
        for micro in range(micros):
            seed = (step * 16 + micro) * 16 + rank
            x = torch.randn(MICRO, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
            found.append((x, (step + rank) % 3 == 0))
    return found


def conditional_layers(stage: int, late: bool) -> None:
    """Ranks use other layers, in other steps; a rank is late. Against one process."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    life = Life(steps, stage=stage, dtype=torch.float64)
    engine = life.engine({})
    torch.manual_seed(0)
    model = Stack().double()
    reference = torch.optim.AdamW(groups_of(model), lr=1e-2)
    delays = random.Random(rank)
    for step in range(5):
        batches = mean_of_ranks(step, life.accumulation, ranks)
        loss = sum(model(x, uses) for x, uses in batches) / len(batches)
        loss.backward()
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        reference.step()
        reference.zero_grad()
        for micro in range(life.accumulation):
            x, uses = batches[rank * life.accumulation + micro]
            if late:
                time.sleep(delays.random() * 0.02)
            engine.backward(engine(x, uses))
            engine.step()
        assert abs(float(engine.get_global_grad_norm()) / norm.item() - 1) <= 2**-22
        for (name, weight), other in zip(engine.module.named_parameters(), model.parameters(), strict=True):
            # DeepSpeed's masters are float32.
            assert torch.allclose(weight, other, rtol=0, atol=1e-6), (stage, step, name)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_use_other_layers(stage, late):
    run_on_ranks(3, conditional_layers, stage, late)


def messages_of_a_step() -> None:
    """A step sends half of the bytes of DeepSpeed's: each gradient once, and each weight."""
    ranks = dist.get_world_size()
    for stage, accumulation in ((1, 3), (2, 3)):
        life = Life(steps, stage=stage, accumulation=accumulation)
        engine = life.engine({})
        steps(engine, 1)
        with Wire() as wire:
            for micro in range(accumulation):
                engine.backward(engine(batch(engine, 1, micro), True))
                engine.step()
        flat = sum(each.numel() for each in engine.optimizer.bit16_groups_flat) * 4
        of_kind = Counter()
        for (kind, _), size in wire.leaving.items():
            of_kind[kind] += size
        times = 1 if stage == 1 else accumulation
        assert of_kind == {"scatter": times * flat * (ranks - 1) // ranks, "gather": flat * (ranks - 1) // ranks}
        # The rest is the norm.
        rest = [size for name, size in wire.sent if name not in ("_reduce_scatter_base_", "_allgather_base_")]
        assert sum(rest) <= 16, wire.sent
        plain = life.engine(PLAIN)
        steps(plain, 1)
        with Wire() as wire:
            for micro in range(accumulation):
                plain.backward(plain(batch(plain, 1, micro), True))
                plain.step()
        reduced = sum(size for name, size in wire.sent if name == "allreduce_")
        # An all-reduce sends each rank's share twice.
        assert 2 * reduced * (ranks - 1) / ranks >= 1.9 * of_kind["scatter"], (reduced, of_kind)


def test_a_step_sends_half_of_deepspeeds_gradients():
    run_on_ranks(2, messages_of_a_step)


def awaited(engine: Any) -> int:
    return sum(isinstance(weight, AwaitedWeight) for weight in engine.module.parameters())


def weights_behind_the_forward() -> None:
    """Weights arrive when their layers run; tensors of a script that share their memory have them at once."""
    engine = Life(steps, accumulation=1).engine({})
    every, seen = len(list(engine.module.parameters())), []
    engine.module.layers[1].register_forward_pre_hook(lambda *_: seen.append(awaited(engine)))
    assert awaited(engine) == 0
    for _ in range(2):
        engine.backward(engine(batch(engine, 0, 0)))
        engine.step()
        assert awaited(engine) == every
        engine.zero_grad()
        assert [weight.requires_grad for weight in engine.module.parameters()]
        assert awaited(engine) == every
    # The first layer and the first two of the list have arrived, and the shared layer.
    assert seen == [0, every - 7], seen
    alias = engine.module.first.weight.data
    engine.backward(engine(batch(engine, 0, 0)))
    before = alias.clone()
    engine.step()
    assert awaited(engine) == 0
    assert not torch.equal(alias, before)
    assert alias.data_ptr() == engine.module.first.weight.data_ptr()
    del alias
    engine.backward(engine(batch(engine, 0, 0)))
    engine.step()
    assert awaited(engine) == every


def test_weights_are_gathered_behind_the_forward():
    run_on_ranks(2, weights_behind_the_forward)


def failing_backward() -> None:
    """The error of a backward is caught when a part of its gradients was sent: the next forward says so."""
    engine = Life(steps, accumulation=1).engine({})
    steps(engine, 1)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("no such gradient")

    loss = engine(batch(engine, 1, 0))
    handle = engine.module.first.register_forward_hook(lambda *given: bool(given[-1].register_hook(fail)) and None)
    steps_before = engine.global_steps
    loss = engine(batch(engine, 1, 0))
    with pytest.raises(ValueError, match="no such gradient"):
        engine.backward(loss)
    handle.remove()
    assert engine.optimizer is not None
    with pytest.raises(RuntimeError, match=r"the backward before it ended with an error.*overlap_comm to false"):
        engine(batch(engine, 1, 0))
    assert engine.global_steps == steps_before


def test_a_caught_error_of_a_backward():
    run_on_ranks(2, failing_backward)


REFUSED = {
    "overlap_comm is false": {"overlap_comm": False},
    "reduce_scatter is false": {"reduce_scatter": False},
    "round_robin_gradients": {"round_robin_gradients": True},
    "contiguous_gradients is false": {"contiguous_gradients": False},
}


def left_to_deepspeed() -> None:
    for reason, zero in REFUSED.items():
        engine = Life(steps).engine(zero)
        assert BUCKETED.get(engine.optimizer) is None
        assert reason in why_not_bucketed(engine, engine.optimizer)


def test_settings_that_buckets_do_not_have_are_deepspeeds():
    run_on_ranks(2, left_to_deepspeed)


def saves_for_universal(folder: str) -> None:
    for name, zero in KINDS.items():
        engine = Life(steps).engine(zero)
        steps(engine)
        engine.save_checkpoint(folder, tag=name)
        torch.save(steps(engine, first=2), f"{folder}/{name}.{dist.get_rank()}.pt")


def loads_universal(folder: str) -> None:
    universal = Life(steps, config={"checkpoint": {"load_universal": True}})
    for name in KINDS:
        expected = torch.load(f"{folder}/{name}.{dist.get_rank()}.pt")
        for zero in KINDS.values():
            engine = universal.engine(zero, seed=1)
            engine.load_checkpoint(folder, tag=f"{name}_universal")
            same(steps(engine, first=2), expected, (name, zero))


@pytest.mark.slow
def test_universal_checkpoints(tmp_path):
    run_on_ranks(2, saves_for_universal, str(tmp_path))
    for name in KINDS:
        folders = ["--input_folder", str(tmp_path / name), "--output_folder", str(tmp_path / f"{name}_universal")]
        convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *folders, "--inject_missing_state"]
        done = subprocess.run(convert, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
    run_on_ranks(2, loads_universal, str(tmp_path))
