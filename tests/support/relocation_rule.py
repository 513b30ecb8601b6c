"""Runs of engines whose experts move between ranks, against the same run without, and against one process."""

from __future__ import annotations

from dataclasses import dataclass

import deepspeed
import expert_adapters
import gradient_rule as rule
import pytest
import tensor_parallel_rule as dense
import tiny_models
import torch
import torch.distributed as dist
from gradient_rule import ACCUMULATION, CLIP, MICRO
from wire import Wire

from ds_npu.features.experts.relocation import Relocation, modules_with_map
from ds_npu.parallel.expert.expert_map import ExpertMap

EXPERTS, STEPS = 8, 6
COUNTS = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "deepseek_v3": "n_routed_experts"}
"""What each family's configuration calls the number of experts."""
ADAM = {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.1}


@dataclass(frozen=True)
class Run:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    maps: list[dict[str, ExpertMap]]
    """After each step."""

    @property
    def relocations(self) -> int:
        """How often some layer's experts moved."""
        return sum(before != after for before, after in zip(self.maps, self.maps[1:], strict=False))


def model_of(family: str, dtype: torch.dtype) -> torch.nn.Module:
    return tiny_models.tiny(family, torch.float32, **{COUNTS[family]: EXPERTS}).to(dtype)


def tokens(step: int, dp: int) -> torch.Tensor:
    """[ACCUMULATION, dp, MICRO, LENGTH]: few different ones in each step, so that loads are uneven and change."""
    made = torch.Generator().manual_seed(step // 2)
    few = torch.randint(3, 60, (4,), generator=made)
    chosen = torch.randint(0, 4, (ACCUMULATION, dp, MICRO, dense.LENGTH), generator=made.manual_seed(100 + step))
    return few[chosen]


def engine_of(family: str, stage: int, dtype: torch.dtype, parallel: dict, moe: dict, **zero: object):
    rule.without_extension()
    model = model_of(family, dtype)
    config = dense.config(stage, dtype, {"parallel": parallel, "moe": moe})
    config["optimizer"] = {"type": "AdamW", "params": ADAM | {"torch_adam": True}}
    config["zero_optimization"] |= zero
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(engine, steps: range, dtype: torch.dtype = torch.float64) -> Run:
    topology = engine.topology
    losses, norms, maps = [], [], [_maps(engine)]
    for step in steps:
        share = 0.0
        for micro in tokens(step, topology.size("dp"))[:, topology.rank("dp")]:
            loss = dense.loss_of(engine, micro.to(engine.device), dtype)
            share += loss.item() / ACCUMULATION
            engine.backward(loss)
            engine.step()
        losses.append(rule.mean_loss(share / topology.size("cp"), topology))
        norms.append(float(engine.get_global_grad_norm()))
        maps.append(_maps(engine))
    weights = {name: each.double() for name, each in dense.shared(engine.whole_state_dict()).items()}
    return Run(losses, norms, weights, maps)


def _maps(engine) -> dict[str, ExpertMap]:
    return {name: mapped.expert_map for name, (_, mapped) in modules_with_map(engine.module).items()}


def one_process(family: str, dp: int, steps: int) -> Run:
    """Plain PyTorch, with nothing of ds_npu, micro-batch by micro-batch."""
    model = model_of(family, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for micro in tokens(step, dp).flatten(0, 1):
            loss = dense.loss_of(model, micro, torch.float64) / (ACCUMULATION * dp)
            loss.backward()
            total += loss.item()
        norm = torch.cat([each.grad.flatten() for each in model.parameters()]).norm()
        for each in model.parameters():
            each.grad.mul_((CLIP / (norm + 1e-6)).clamp(max=1))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total), norms.append(norm.item())
    return Run(losses, norms, {name: each.detach() for name, each in model.named_parameters()}, [])


def difference(found: Run, expected: Run) -> float:
    """The largest relative difference of losses, norms and weights."""
    pairs = [*zip(found.losses, expected.losses, strict=True), *zip(found.norms, expected.norms, strict=True)]
    trained = {name: expected.weights[name] for name in found.weights if name in expected.weights}
    return max(*(abs(a / b - 1) for a, b in pairs), rule.relative(found.weights, trained))


def hold_to_a_run_without(family: str, parallel: dict, moe: dict, stages: tuple[int, ...], zero: dict) -> None:
    dp = dist.get_world_size() // (parallel.get("tensor", 1) * parallel.get("context", 1))
    expected = one_process(family, dp, STEPS)
    for stage in stages:
        plain = train(engine_of(family, stage, torch.float64, parallel, moe, **zero), range(STEPS))
        engine = engine_of(family, stage, torch.float64, parallel, moe | {"placement_interval": 1}, **zero)
        moved = train(engine, range(STEPS))
        where = (family, parallel, moe, stage, difference(moved, plain), difference(moved, expected), moved.relocations)
        assert moved.relocations >= 2, where
        # ZeRO 1 and 2 sum the squares of runs of weights, which have other ranks, and round the norm to float32.
        assert difference(moved, plain) <= (2**-23 if stage in (1, 2) else dense.EXACT), where
        assert difference(moved, expected) <= (dense.EXACT if stage == 0 else dense.SINGLE), where


def resume(family: str, parallel: dict, stages: tuple[int, ...], folder: str) -> None:
    """A run that is saved within an interval, when experts have moved, goes on as the uninterrupted one, to the bit."""
    for stage in stages:
        moe = {"placement_interval": 2}
        first = engine_of(family, stage, torch.float32, parallel, moe)
        written = train(first, range(3), torch.float32)
        assert first.save_checkpoint(f"{folder}/{stage}")
        uninterrupted = train(first, range(3, 8), torch.float32)
        assert written.relocations and uninterrupted.relocations, (family, parallel, stage)
        second = engine_of(family, stage, torch.float32, parallel, moe)
        # Its experts have moved elsewhere by then.
        assert train(second, range(10, 15), torch.float32).maps[-1] != written.maps[-1]
        second.load_checkpoint(f"{folder}/{stage}")
        resumed = train(second, range(3, 8), torch.float32)
        assert resumed.maps == uninterrupted.maps, (family, parallel, stage)
        assert (resumed.losses, resumed.norms) == (uninterrupted.losses, uninterrupted.norms), (family, parallel, stage)
        assert all(torch.equal(each, resumed.weights[name]) for name, each in uninterrupted.weights.items())


def other_intervals(folder: str) -> None:
    """Experts that have moved load where experts move; those in plain order load there, too."""
    plain, moving = {}, {"placement_interval": 2}
    first = engine_of("mixtral", 2, torch.float32, {"expert": 2}, moving)
    assert train(first, range(3), torch.float32).relocations
    first.save_checkpoint(f"{folder}/moved")
    second = engine_of("mixtral", 2, torch.float32, {"expert": 2}, plain)
    with pytest.raises(ValueError, match=r"placement_interval: found 0, but the checkpoint's experts .* were moved"):
        second.load_checkpoint(f"{folder}/moved")
    expected = train(second, range(2), torch.float32).weights
    second.save_checkpoint(f"{folder}/plain")
    first.load_checkpoint(f"{folder}/plain")
    assert all(torch.equal(each, expected[name]) for name, each in train(first, range(0)).weights.items())


def count_bytes(parallel: dict, stages: tuple[int, ...]) -> None:
    """What a relocation sends: of each expert that changes its rank the weight, its copy and two moments, once."""
    for stage in stages:
        engine = engine_of("mixtral", stage, torch.float32, parallel, {"placement_interval": 100})
        train(engine, range(1), torch.float32)
        topology, layers = engine.topology, modules_with_map(engine.module)
        before = {name: mapped.expert_map for name, (_, mapped) in layers.items()}
        with Wire() as wire:
            Relocation(engine, 100).relocate()
        leaving = sum(size for (kind, _), size in wire.leaving.items() if kind == "exchange")
        of_all: list = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, leaving)
        moved = sum(
            len(set(was) - set(now))
            for name, (_, mapped) in layers.items()
            for was, now in zip(before[name], mapped.expert_map, strict=True)
        )
        assert moved
        one = 3 * 32 * 48 * 4
        copies = topology.size("edp")
        # A whole weight goes to each copy, a part of it only once; the optimizer's state has three or two more.
        expected = {0: 3 * copies, 1: copies + 3, 2: copies + 3, 3: 4}[stage]
        assert sum(of_all) == moved * one * expected, (stage, of_all, moved)


def refused() -> None:
    """What cannot be moved is refused before the first step, by the key and what was found."""
    for stage, change, said in (
        (2, {"offload_optimizer": {"device": "cpu"}}, "offload_optimizer.device is cpu"),
        (3, {"zero_hpz_partition_size": 2}, "zero_hpz_partition_size is 2"),
        (1, {"round_robin_gradients": True}, "round_robin_gradients changes the order"),
    ):
        with pytest.raises(ValueError, match=said):
            engine_of("mixtral", stage, torch.float32, {"expert": 2}, {"placement_interval": 5}, **change)
    config = dense.config(0, torch.float32, {"parallel": {"expert": 2}, "moe": {"placement_interval": 5}})
    with pytest.raises(ValueError, match="has an adapter, whose factors do not move"):
        deepspeed.initialize(model=expert_adapters.adapted("mixtral", torch.float32), config=config)
    model = model_of("mixtral", torch.float32)
    own = torch.optim.Rprop(model.parameters())
    del config["optimizer"]
    with pytest.raises(ValueError, match="placement_interval: found 5, but Rprop is none of the optimizers"):
        deepspeed.initialize(model=model, optimizer=own, config=config)
