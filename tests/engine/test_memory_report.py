"""``ds_npu.memory_report``: what a step holds against arithmetic, for what, and that other steps pay nothing."""

from __future__ import annotations

from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ds_npu.features.memory_report import reported_step as feature
from ds_npu.memory.memory_use import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    REST,
    WEIGHTS,
    MemoryUse,
    memory_use,
    use_table,
)
from ds_npu.memory.storage_record import StorageRecord

SMALL_BUCKETS = {"reduce_bucket_size": 4096, "allgather_bucket_size": 4096}
CASES: dict[str, tuple[int, dict[str, object], tuple[int, ...]]] = {
    "data 2": (2, {}, (0, 1, 2, 3)),
    "tensor 2": (2, {"parallel": {"tensor": 2}}, (0, 3)),
    "context 2": (2, {"parallel": {"context": 2}}, (1,)),
    "expert 2": (2, {"parallel": {"expert": 2}}, (2,)),
    "pipeline 2": (2, {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "zb_h1"}}, (0, 1)),
    "recomputed": (2, {"recompute": {"layers": "all"}}, (1,)),
}


def trained(stage: int, section: dict[str, object], folder: str) -> tuple[list[torch.Tensor], object]:
    """Losses of three steps, and the engine."""
    import deepspeed

    moe = "expert" in dict(section.get("parallel", {}))
    model = tiny_models.tiny("qwen3_moe" if moe else "llama", torch.float32, num_hidden_layers=3)
    config = tensor_rule.config(stage, torch.float32, section)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config["zero_optimization"] |= SMALL_BUCKETS
    config["csv_monitor"] = {"enabled": bool(folder), "output_path": folder, "job_name": "job"}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for ids in tensor_rule.batches(3 * rule.MICRO * rule.ACCUMULATION).split(rule.MICRO):
        loss = engine(input_ids=ids, labels=ids).loss
        losses.append(loss.detach().clone())
        engine.backward(loss)
        engine.step()
    return losses, engine


def reports(section: dict[str, object], stages: tuple[int, ...], folder: str) -> None:
    rule.without_extension()
    for stage in stages:
        expected, _ = trained(stage, section, "")
        uses: list[MemoryUse] = []

        def table(step: int, found: list[MemoryUse], uses: list[MemoryUse] = uses) -> str:
            assert step == 2
            uses.extend(found)
            return use_table(step, found)

        here = Path(folder) / f"{stage}"
        with mock.patch.object(feature, "use_table", table):
            found, engine = trained(stage, section | {"memory_report": f"{here}/use.svg"}, f"{here}")
        assert all(map(torch.equal, found, expected)), stage
        assert _get_current_dispatch_mode() is None and not {"forward", "train_batch"} & vars(engine).keys()
        if dist.get_rank() == 0:
            check(uses, engine, stage, "parallel" in section)
            assert len(list(here.rglob("*peak_bytes*.csv"))) == 1
            drawn = (here / "use.svg").read_text()
            assert ElementTree.fromstring(drawn).tag.endswith("svg") and "optimizer state" in drawn


def check(uses: list[MemoryUse], engine, stage: int, is_sharded: bool) -> None:
    assert [use.rank for use in uses] == list(range(dist.get_world_size()))
    mine = uses[0].at_peak
    assert {WEIGHTS, GRADIENTS, OPTIMIZER} <= mine.keys(), (stage, mine)
    # Stages may have their peak in the optimizer step.
    assert is_sharded or any(name.startswith(ACTIVATIONS) for name in mine), (stage, mine)
    weights = sum(weight.nbytes for weight in engine.module.parameters())
    buffers = sum(each.nbytes for each in engine.module.buffers())
    if not is_sharded and stage < 3:
        # AdamW's two moments, and of ZeRO this rank's half of them and of float32 masters; a step counter for each
        # group or weight. ZeRO pads its halves.
        state = 2 * weights if stage == 0 else 3 * weights / 2
        assert state <= mine[OPTIMIZER] <= state + 4096, (stage, mine, weights)
        assert weights + buffers <= mine[WEIGHTS] <= weights + buffers + 256, (stage, mine, weights)
        if stage == 0:
            assert weights <= mine[GRADIENTS], (stage, mine, weights)
    assert REST not in mine and uses[0].reserved is None


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize("case", CASES)
def test_what_a_step_holds(case, tmp_path):
    ranks, section, stages = CASES[case]
    run_on_ranks(ranks, reports, section, stages, f"{tmp_path}")


# ---- the parts ----


def test_a_record_counts_what_tensors_hold():
    """Against sums by hand: views hold nothing, in-place operators make nothing, what was there is told."""
    use = ["first"]
    record = StorageRecord("cpu", lambda: use[-1])
    before = torch.zeros(100)
    with record:
        a = torch.empty(1000)
        b = a.view(10, 100).t()
        a.add_(1)
        use.append("second")
        c = a + 1
        del a, b
        d = torch.empty(10)
        c.resize_(2000)
    record.see(before, "there")
    with record:
        e = d * 2
        del c
    record.close()
    torch.empty(10_000)
    found = memory_use(0, record, None, None)
    assert found.at_peak == {"second": 8000 + 40 + 40, "there": 400} and found.peak == 8480
    assert max(sum(held.values()) for _, held in found.curve) == found.peak
    sizes = [change.size for change in record.changes]
    assert sizes == [4000, 4000, -4000, 40, 4000, 400, 40, -8000] and e is not None


def test_a_table_names_the_ranks_with_the_highest_peaks():
    uses = [MemoryUse(rank, {WEIGHTS: 2**30 * (10 + rank % 10), REST: 2**28}, 2**34, 2**20, []) for rank in range(20)]
    lines = use_table(2, uses).splitlines()
    assert lines[0].split()[-16::2] == ["rank"] * 8 and lines[0].split()[-15::2] == [
        "6",
        "7",
        "8",
        "9",
        "16",
        "17",
        "18",
        "19",
    ]
    assert lines[1].split() == [WEIGHTS, *["16.0", "17.0", "18.0", "19.0"] * 2]
    assert lines[-1] == "the 8 of 20 ranks with the highest peaks; the lowest: rank 0, 10.2"
