"""``recompute.budget_gib`` in DeepSpeed's engine: plans of all ranks, losses to the bit, and what is impossible."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
import torch.distributed as dist
from memory_rule import DROPS, WORLDS
from ranks import run_on_ranks

from ds_npu.features.chunked_loss import loss_by_chunks as feature
from ds_npu.features.recompute.budget import MemoryBudget
from ds_npu.memory.storage_record import StorageRecord
from ds_npu.parallel.tensor.shard_access import local_shard
from ds_npu.planner import chunk_choice
from ds_npu.planner.memory_plan import Option, PlannedLayer, fastest, measured, smallest
from ds_npu.planner.memory_plan_table import GIB, StagePlan, section_of

STEPS = 4
LENGTH = 48
"""Of sequences, whose activations are then more than the buffers of gradients."""
FOLLOW = MemoryBudget._follow
BUCKETS = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000, "stage3_prefetch_bucket_size": 1000}
PIPELINES: list[dict[str, object]] = [
    {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "1f1b"}},
    {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "zb_h1"}},
    {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "interleaved", "virtual_stages": 2}},
]
CORNERS = [("data 2", "llama", (0, 3)), ("sequence parallel", "gpt2", (1,)), ("context 2", "llama", (2,))]
CASES = [(world, family, (0, 1, 2, 3)) for world in WORLDS for family in ("llama", "gpt2", "qwen3_moe")]


def layers_of(family: str, count: int) -> dict[str, int]:
    return {"n_layer" if family == "gpt2" else "num_hidden_layers": count}


def held_now() -> int:
    """Bytes of all tensors: DeepSpeed keeps engines."""
    record = StorageRecord("cpu", lambda: "")
    record.see_all()
    return sum(change.size for change in record.changes)


@dataclass
class Run:
    """Some steps of an engine."""

    numbers: list[torch.Tensor]
    """Losses, and the weights behind the steps."""
    before: int
    """Bytes that were held."""
    stages: list[StagePlan] = field(default_factory=list)

    def is_like(self, expected: Run) -> bool:
        pairs = list(zip(self.numbers, expected.numbers, strict=True))
        return len(pairs) > 10 and all(map(torch.equal, *zip(*pairs, strict=True)))

    def most(self, choose: Callable[[PlannedLayer], Option]) -> int:
        """Bytes that the stage needs which needs most, where ``choose`` chooses for each layer."""
        return max(
            measured(each.layers, each.moments, list(map(choose, each.layers))).peak_bytes - self.before
            for each in self.stages
        )


def trained(
    family: str, stage: int, section: dict[str, object], room: int | None = None, optimizer: str = "SGD", **more: int
) -> Run:
    """``room``: bytes of the budget beside what is held before; None: without a budget."""
    import deepspeed

    # All ranks give the same budget.
    most = [0] * dist.get_world_size()
    dist.all_gather_object(most, held_now())
    torch.manual_seed(5)
    changes = DROPS.get(family, {}) | layers_of(family, 4) | more
    model = tiny_models.tiny(family, torch.float32, **changes)
    if room is not None:
        section = section | {"recompute": {"budget_gib": (max(most) + room) / GIB}}
    config = tensor_rule.config(stage, torch.float32, section)
    config["zero_optimization"] |= BUCKETS
    torch_adam = {"torch_adam": True} if optimizer == "AdamW" else {}
    config["optimizer"] = {"type": optimizer, "params": {"lr": rule.LR} | torch_adam}
    run = Run([], max(most))

    def follow(budget: MemoryBudget, stages: list[StagePlan]) -> None:
        run.stages = stages
        FOLLOW(budget, stages)

    with mock.patch.object(MemoryBudget, "_follow", follow):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        torch.manual_seed(7)
        for ids in tiny_models.tokens(STEPS * rule.MICRO * rule.ACCUMULATION, LENGTH).split(rule.MICRO):
            loss = engine(input_ids=ids, labels=ids).loss
            run.numbers.append(loss.detach().clone())
            engine.backward(loss)
            engine.step()
    run.numbers += map(local_shard, rule.whole_weights(model).values())
    return run


def hold(family: str, section: dict[str, object], stages: tuple[int, ...]) -> None:
    """Some budgets: the same numbers, one plan, within the budget; the plan's own keys do the same."""
    rule.without_extension()
    for stage in stages:
        expected = trained(family, stage, section)
        free = trained(family, stage, section, 64 * GIB)
        assert free.is_like(expected) and section_of(free.stages) == {}, stage
        least, most = free.most(smallest), free.most(fastest)
        assert least < most
        for share in (0.1, 0.6):
            room = int(least + share * (most - least))
            found = trained(family, stage, section, room)
            explicit = section_of(found.stages)
            where = (stage, share, explicit)
            assert found.is_like(expected), where
            assert max(each.plan.peak_bytes for each in found.stages) <= found.before + room, where
            everywhere = [explicit] * dist.get_world_size()
            dist.all_gather_object(everywhere, explicit)
            assert explicit["recompute"] and everywhere == [explicit] * len(everywhere), where
            assert trained(family, stage, section | explicit).is_like(expected), where


def hold_chunks(section: dict[str, object]) -> None:
    """Plans that give the loss a part: within the budget, the same numbers but for roundings of sums."""
    rule.without_extension()
    words = {"vocab_size": 2048}
    for module in (chunk_choice, feature):
        mock.patch.object(module, "LEAST_TOKENS", 8).start()
    expected = trained("llama", 1, section | {"chunked_loss": 8}, **words)
    planned = section | {"chunked_loss": "planned"}
    free = trained("llama", 1, planned, 64 * GIB, **words)
    least, most = free.most(smallest), free.most(fastest)
    sizes = [section_of(free.stages)["chunked_loss"]]
    for share in (0.5, 0.02):
        room = int(least + share * (most - least))
        found = trained("llama", 1, planned, room, **words)
        explicit = section_of(found.stages)
        sizes.append(explicit["chunked_loss"])
        assert max(each.plan.peak_bytes for each in found.stages) <= found.before + room, explicit
        for run in (free, found, trained("llama", 1, section | explicit, **words)):
            for number, plain in zip(run.numbers, expected.numbers, strict=True):
                assert torch.allclose(number, plain, rtol=1e-4, atol=1e-6), explicit
    # Of stages, the first one needs most, and the last one has the loss.
    assert sizes == sorted(sizes, reverse=True) and (sizes[0] > sizes[-1] or section), sizes


def impossible(file: Path, optimizer: str, stage: int) -> None:
    rule.without_extension()
    with pytest.raises(ValueError, match=r"budget_gib: found \S+; the least that works here is \S+: ") as raised:
        trained("llama", stage, {}, 1, optimizer)
    said = str(raised.value)
    assert "buckets" not in said
    file.write_text(said.split("works here is ")[1].split(":")[0])
    if stage > 0:
        with mock.patch.dict(BUCKETS, clear=True), pytest.raises(ValueError) as raised:
            trained("llama", stage, {}, 1, optimizer)
        large = (
            "of it are DeepSpeed's buckets of gradients, zero_optimization.reduce_bucket_size: 500,000,000 elements)"
        )
        assert large in str(raised.value), raised.value
        remedy = "What to do: zero_optimization.reduce_bucket_size 2048, the elements of the largest weight, or"
        assert remedy in str(raised.value)


def possible(least_gib: float, optimizer: str, stage: int) -> None:
    rule.without_extension()
    for share, works in ((1.02, True), (0.9, False)):
        with nullcontext() if works else pytest.raises(ValueError, match="the least that works here"):
            trained("llama", stage, {}, int(share * least_gib * GIB) - held_now(), optimizer)


@pytest.mark.slow
@pytest.mark.matrix(corners=len(CORNERS), drawn=1)
@pytest.mark.parametrize(("world", "family", "stages"), [*CORNERS, *CASES], ids=str)
def test_a_planned_run_is_that_without_to_the_bit(world, family, stages):
    ranks, parallel = WORLDS[world]
    if "expert" in parallel and family != "qwen3_moe":
        pytest.skip("without experts")
    run_on_ranks(ranks, hold, family, {"parallel": parallel}, stages, deadline_s=900.0)


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize("section", PIPELINES, ids=str)
def test_planned_pipeline_stages(section):
    run_on_ranks(2, hold, "llama", section, (0, 1), deadline_s=900.0)


@pytest.mark.parametrize("section", [{}, PIPELINES[0], PIPELINES[2]], ids=str)
def test_planned_chunks_of_the_loss(section):
    run_on_ranks(2, hold_chunks, section, deadline_s=900.0)


@pytest.mark.parametrize(("optimizer", "stage"), [("AdamW", 0), ("SGD", 0), ("AdamW", 1), ("AdamW", 2), ("AdamW", 3)])
def test_an_impossible_budget_is_an_error_that_names_the_least_one(tmp_path, optimizer, stage):
    run_on_ranks(1, impossible, tmp_path / "least", optimizer, stage)
    # In a process without an engine.
    run_on_ranks(1, possible, float((tmp_path / "least").read_text()), optimizer, stage)
