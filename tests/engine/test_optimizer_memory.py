"""``ds_npu.optimizer_memory`` in DeepSpeed's engine: the same training, fewer bytes, checkpoints both ways."""

from __future__ import annotations

import dataclasses

import deepspeed
import gradient_rule as rule
import kept_state as rig
import pytest
import torch
import torch.distributed as dist
from adapted_models import ATTENTION, MLP, adapted
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from kept_state import Case
from ranks import run_on_ranks

from ds_npu.zero_ext import bucket_plan
from ds_npu.zero_ext.optimizer_state import masters_of

pytestmark = pytest.mark.slow

SHARED, SWAPPED = {"share_fp32": True}, {"swap": True}
BOTH = SHARED | SWAPPED
PARTLY = SWAPPED | {"resident_gib": 30_000 * 12 / (1 << 30)}
"""Some chunks stay on the device."""
BF16, INT8 = {"moments": "bf16"}, {"moments": "int8"}
WRAPPERS = {
    "FP16_UnfusedOptimizer": Case(0),
    "BF16_Optimizer": Case(1, "fp32"),
    "ZeRO 1": Case(1),
    "ZeRO 2": Case(2),
    "ZeRO 2, float32 gradients": Case(2, "fp32"),
    "ZeRO 3": Case(3),
    "ZeRO 2, fused AdamW": Case(2, torch_fused=True),
}


def train_alike(cases: list[Case], sections: list[dict[str, object]]) -> None:
    rule.without_extension()
    for case in cases:
        plain = rig.engine_of(case, {})
        losses, weights = rig.train(plain), rig.weights_of(plain)
        for section in sections:
            engine = rig.engine_of(case, section)
            where = (case, section, type(engine.optimizer).__name__)
            assert rig.alike(rig.train(engine), losses) and rig.alike(rig.weights_of(engine), weights), where


WORLDS = {
    "data 2": (2, {}),
    "tensor 2": (2, {"tensor": 2}),
    "context 2": (2, {"context": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
    "expert 2": (2, {"expert": 2}),
    "tensor 2 x data 2": (4, {"tensor": 2}),
}
CASES = [(world, name) for world in WORLDS for name in WRAPPERS if (world, name) != ("pipeline 2", "ZeRO 3")]
CORNERS = [("data 2", "ZeRO 2"), ("tensor 2", "ZeRO 3"), ("data 2", "BF16_Optimizer"), ("pipeline 2", "ZeRO 1")]


@pytest.mark.matrix(corners=4, drawn=1)
@pytest.mark.parametrize(("world", "wrapper"), [*CORNERS, *(each for each in CASES if each not in CORNERS)])
def test_shared_and_swapped_runs_are_those_without_to_the_bit(world, wrapper):
    """AdamW, with clipping that bites and two micro-batches a step."""
    ranks, parallel = WORLDS[world]
    case = WRAPPERS[wrapper]
    family = "qwen3_moe" if "expert" in parallel else "llama"
    case = dataclasses.replace(case, parallel=tuple(parallel.items()), family=family)
    run_on_ranks(ranks, train_alike, [case], [SHARED, SWAPPED, BOTH, PARTLY])


def train_adapters(stage: int) -> None:
    rule.without_extension()
    runs = []
    for section in ({}, BOTH):
        model = adapted("llama", ATTENTION + MLP).to(torch.bfloat16)
        engine = rig.engine_of(Case(stage), section, model)
        runs.append([*rig.train(engine), *rig.weights_of(engine)])
    assert rig.alike(*runs), stage


@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_are_trained_as_without(stage):
    run_on_ranks(2, train_adapters, stage)


def resume(folder: str, names: list[str]) -> None:
    """From each kind of run into each: what was saved is float32, whatever kept it."""
    rule.without_extension()
    for name in names:
        case = WRAPPERS[name]
        plain = rig.engine_of(case, {})
        rig.train(plain)
        plain.save_checkpoint(f"{folder}/{name}/plain")
        expected = [*rig.train(plain, rig.STEPS), *rig.weights_of(plain)]
        for index, section in enumerate((SHARED, BOTH)):
            engine = rig.engine_of(case, section)
            engine.load_checkpoint(f"{folder}/{name}/plain")
            assert rig.alike([*rig.train(engine, rig.STEPS), *rig.weights_of(engine)], expected), (name, section)
            engine = rig.engine_of(case, section)
            rig.train(engine)
            engine.save_checkpoint(f"{folder}/{name}/{index}")
            again = [*rig.train(engine, rig.STEPS), *rig.weights_of(engine)]
            assert rig.alike(again, expected), (name, section, "saving changed it")
            other = rig.engine_of(case, {})
            other.load_checkpoint(f"{folder}/{name}/{index}")
            assert rig.alike([*rig.train(other, rig.STEPS), *rig.weights_of(other)], expected), (name, section)


@pytest.mark.parametrize("names", [["FP16_UnfusedOptimizer", "BF16_Optimizer"], ["ZeRO 1", "ZeRO 2", "ZeRO 3"]])
def test_checkpoints_load_with_and_without(tmp_path, names):
    run_on_ranks(2, resume, str(tmp_path), names)


def resume_moments(folder: str) -> None:
    """A run goes on from its own checkpoint as if it had not stopped; a plain one loads the very values."""
    rule.without_extension()
    for stage, section in ((1, BF16), (3, INT8), (2, INT8 | BOTH)):
        case = Case(stage)
        engine = rig.engine_of(case, section)
        rig.train(engine)
        engine.save_checkpoint(f"{folder}/{stage}")
        expected = [*rig.train(engine, rig.STEPS), *rig.weights_of(engine)]
        again = rig.engine_of(case, section)
        again.load_checkpoint(f"{folder}/{stage}")
        plain = rig.engine_of(case, {})
        plain.load_checkpoint(f"{folder}/{stage}")
        states = [rig.arrays(run.optimizer.state_dict()) for run in (plain, again)]
        # A master and two moments of each group.
        assert len(states[0]) == 3 and rig.alike(*states) and all(each.any() for each in states[0]), (stage, section)
        assert rig.alike([*rig.train(again, rig.STEPS), *rig.weights_of(again)], expected), (stage, section)


def test_moments_in_fewer_bits_come_back_from_a_checkpoint(tmp_path):
    run_on_ranks(2, resume_moments, str(tmp_path))


def access() -> None:
    """DeepSpeed's functions for single weights read, and write, what a plain run has."""
    rule.without_extension()
    for case in (Case(1), Case(1, "fp32"), Case(3)):
        runs = [rig.engine_of(case, section) for section in ({}, BOTH, SWAPPED)]
        for engine in runs:
            rig.train(engine)
        found = [[read(engine) for engine in runs] for read in (masters, seconds)]
        assert all(rig.alike(each[0], other) for each in found for other in each[1:]), case
        for engine in runs:
            weight = next(engine.module.parameters())
            safe_set_full_optimizer_state(weight, safe_get_full_optimizer_state(weight, "exp_avg") * 0.5, "exp_avg")
            if engine is not runs[1]:
                safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight) * 1.25)
            rig.train(engine, 7, 1)
        assert rig.alike(masters(runs[0]), masters(runs[2])), case
        assert not rig.alike(masters(runs[0]), masters(runs[1])), case
        with pytest.raises(ValueError, match=r"share_fp32: found float32 master weights of which"):
            weight = next(runs[1].module.parameters())
            value = safe_get_full_fp32_param(weight) * 1.25
            safe_set_full_fp32_param(weight, value)
            # ZeRO 1 has the first weight on the first rank only.
            assert dist.get_rank() == 1
            raise ValueError("share_fp32: found float32 master weights of which another rank has")
        if case.accumulated is None:
            with pytest.raises(ValueError, match=r"offload_states\(\): found a call; ds_npu.optimizer_memory"):
                runs[1].optimizer.offload_states()
        with pytest.raises(ValueError, match=r"step\(closure\): found one"):
            runs[1].optimizer.optimizer.step(lambda: 0)


def masters(engine) -> list[torch.Tensor]:
    return [safe_get_full_fp32_param(weight) for weight in engine.module.parameters()]


def seconds(engine) -> list[torch.Tensor]:
    return [safe_get_full_optimizer_state(weight, "exp_avg_sq") for weight in engine.module.parameters()]


def test_single_weights_are_read_and_written():
    run_on_ranks(2, access)


BYTES = {"plain": ({}, 12), "shared": (SHARED, 10), "bf16": (BF16, 8), "int8": (INT8 | SHARED, 4)}
"""By name: the section, and bytes of master and moments that a weight of the rank's shard takes."""


def count_bytes(name: str) -> None:
    """Storages that are alive between steps, and those of a plain run: the difference is that of the formula."""
    rule.without_extension()
    bucket_plan.LEAST = 10**6  # Scales of moments and lists of ties, of which a chunk has some, have no row there.
    engines, found = [], []
    for section in ({}, *(section for section, _ in BYTES.values())):
        before = rig.live_bytes()
        engines.append(rig.engine_of(WRAPPERS[name], section))
        rig.train(engines[-1])
        found.append(rig.live_bytes() - before)
    elements = sum(master.numel() for master, _ in masters_of(engines[0].optimizer))
    # What a first engine leaves for good is not counted.
    for (section, size), more in zip(BYTES.values(), found[1:], strict=True):
        saved = found[1] - more
        assert abs(saved - (12 - size) * elements) <= 0.02 * 12 * elements, (name, section, saved, elements)


@pytest.mark.parametrize("name", WRAPPERS)
def test_bytes_that_are_alive_between_steps(name):
    run_on_ranks(2, count_bytes, name)


def refuse() -> None:
    """What no config names, when the engine is made; an engine that only evaluates is left alone."""
    rule.without_extension()
    for optimizer, said in (
        (lambda weights: torch.optim.SGD(weights, lr=0.1), "SGD is none of the optimizers whose steps"),
        (lambda weights: torch.optim.AdamW(weights, amsgrad=True), r"AdamW\(amsgrad=True\) was not tried"),
    ):
        model = rig.Words()
        config = Case(1).config(SHARED) | {"zero_allow_untested_optimizer": True}
        del config["optimizer"]
        with pytest.raises(ValueError, match=rf"ds_npu.optimizer_memory: {said}"):
            deepspeed.initialize(model=model, optimizer=optimizer(model.parameters()), config=config)
    for stage in (0, 3):
        config = Case(stage).config(SHARED)
        del config["optimizer"]
        engine, *_ = deepspeed.initialize(model=rig.Words(), config=config)
        ids = torch.zeros(1, 4, dtype=torch.int64)
        assert engine(input_ids=ids, labels=ids).loss.isfinite()


def test_optimizers_that_are_not_known_are_refused():
    run_on_ranks(1, refuse)


def agree_on_replicas(stages: list[int]) -> None:
    """Tensor ranks round the moments of weights that they hold alike in the same way."""
    rule.without_extension()
    for stage in stages:
        engine = rig.engine_of(Case(stage, None, (("tensor", 2),)), BF16 | SHARED)
        rig.train(engine)
        norms = [each for each in rig.weights_of(engine) if each.dim() == 1]
        everyones: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, norms)
        assert norms and rig.alike(*everyones), stage


def test_tensor_ranks_agree_on_moments_in_bf16():
    run_on_ranks(2, agree_on_replicas, [0, 1])
