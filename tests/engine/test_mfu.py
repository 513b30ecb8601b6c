"""``watch.mfu``: FLOP of a step against hand formulas and torch's counter; those of the ranks add up to the whole."""

from __future__ import annotations

import csv
import functools
from pathlib import Path

import peft
import pytest
import tiny_models
import torch.distributed as dist
from counted_steps import (
    ACCUMULATION,
    BY_HAND,
    CAUSAL,
    HEADS,
    HIDDEN,
    HIDES,
    INNER,
    LAYERS,
    PACKED,
    VOCABULARY,
    WIDTH,
    B,
    S,
    dense,
    packed,
    step_of,
    torch_counts,
)
from ranks import run_on_ranks

from ds_npu.features.watch.throughput import HFU, MFU, STEP_TIME
from ds_npu.topology.machine import A2


def one_process() -> None:
    for family, expected in BY_HAND.items():
        found = step_of(family, {})
        assert found.model == ACCUMULATION * expected, (family, found.model / ACCUMULATION, expected)
        assert found.executed == ACCUMULATION * torch_counts(family), family
        assert found.peak == A2.peak
    assert torch_counts("llama") - BY_HAND["llama"] == HIDES
    parameters = sum(each.numel() for each in tiny_models.tiny("llama").parameters())
    assert step_of("llama", {}).six_nd == 6 * parameters * ACCUMULATION * B * S
    assert step_of("mixtral", {}).six_nd is None


def other_computations() -> None:
    """Fused attention, recomputation, a loss by chunks and direct sums of gradients have the same model's FLOP."""
    model = ACCUMULATION * dense(4)
    head = ACCUMULATION * 2 * B * S * HIDDEN * VOCABULARY
    executed = ACCUMULATION * torch_counts("llama")
    last = ACCUMULATION * LAYERS * 2 * B * S * HIDDEN * INNER
    again = executed // 3 - head - last
    """torch's checkpoint stops before the last product of a block, of which nothing is saved."""
    fused = model + ACCUMULATION * LAYERS * 2 * CAUSAL * HEADS * WIDTH
    """The backward of a fused attention computes the scores again."""
    for section, changes, expected in (
        ({}, {"attn_implementation": "sdpa"}, fused),
        ({"recompute": {"layers": "all"}}, {}, executed + again),
        ({"chunked_loss": 4}, {}, executed),
        ({"fused_ops": dict.fromkeys(("rms_norm", "swiglu", "rotary", "cross_entropy"), True)}, {}, executed),
    ):
        found = step_of("llama", section, changes)
        assert (found.model, found.executed) == (model, expected), (section, changes, found, model, expected)
    assert step_of("llama", {}, make=packed).model == ACCUMULATION * dense(4, PACKED)
    assert step_of("llama", {}, {"attn_implementation": "sdpa"}, packed).model == ACCUMULATION * dense(4, PACKED)
    assert step_of("llama", {}, prepared=compiled).model == model
    adapted = step_of("llama", {}, prepared=lora)
    assert adapted.executed == ACCUMULATION * torch_counts("llama", prepared=lora) and adapted.six_nd is None


def compiled(model):
    model.compile(backend="eager")
    return model


def lora(model):
    return peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))


@pytest.mark.slow
@pytest.mark.parametrize("body", [one_process, other_computations])
def test_flop_are_those_of_hand_formulas(body):
    run_on_ranks(1, body)


WORLDS = [
    ("llama", {"parallel": {"tensor": 2}}),
    ("llama", {"parallel": {"tensor": 2, "sequence_parallel": True}}),
    ("llama", {"parallel": {"context": 2}, "context_parallel": {"algorithm": "ulysses"}}),
    ("llama", {"parallel": {"context": 2}, "context_parallel": {"algorithm": "ring"}}),
    ("llama", {"parallel": {"pipeline": 2}}),
    ("llama", {"parallel": {"pipeline": 2}, "recompute": {"layers": "all"}}),
    ("qwen2", {"parallel": {"tensor": 2}}),
    ("qwen2", {}),
    ("mixtral", {"parallel": {"expert": 2}}),
    ("mixtral", {"parallel": {"tensor": 2}}),
    ("mixtral", {"parallel": {"tensor": 2, "sequence_parallel": True}}),
    ("mixtral", {"parallel": {"context": 2}}),
    ("deepseek_v3", {"parallel": {"tensor": 2}}),
    ("deepseek_v3", {"parallel": {"tensor": 2, "sequence_parallel": True}}),
    ("deepseek_v3", {"parallel": {"expert": 2}}),
    ("deepseek_v3", {"parallel": {"pipeline": 2}}),
]


def add_up(family: str, section: dict) -> None:
    found = step_of(family, section)
    axes = section.get("parallel", {}).keys()
    replicas = 1 if axes & {"tensor", "context", "pipeline"} else dist.get_world_size()
    expected = replicas * ACCUMULATION * BY_HAND[family]
    assert found.model == expected, (family, section, found.model, expected)
    assert found.executed >= found.model and found.peak == 2 * A2.peak


@pytest.mark.slow
@pytest.mark.matrix(corners=4, drawn=2)
@pytest.mark.parametrize(("family", "section"), WORLDS)
def test_flop_of_the_ranks_add_up_to_the_whole(family, section):
    run_on_ranks(2, add_up, family, section)


def train_with_a_monitor(folder: str) -> None:
    monitor = {"enabled": True, "output_path": folder, "job_name": "job"}
    found = step_of("llama", {}, csv_monitor=monitor)
    (Path(folder) / "flop").write_text(f"{found.model} {found.executed} {found.peak}")


def test_the_monitor_has_them(tmp_path):
    run_on_ranks(1, train_with_a_monitor, str(tmp_path))
    model, executed, peak = map(float, (tmp_path / "flop").read_text().split())
    read = functools.partial(rows_of, tmp_path)
    seconds = [each / 1000 for each in read(STEP_TIME)]
    assert len(seconds) == 3
    # The counted step is slow: its shares are not written.
    assert read(MFU) == pytest.approx([model / each / peak for each in seconds[1:]])
    assert read(HFU) == pytest.approx([executed / each / peak for each in seconds[1:]])


def rows_of(folder: Path, event: str) -> list[float]:
    (file,) = folder.rglob(f"{event.replace('/', '_')}.csv")
    return [float(row[1]) for row in list(csv.reader(file.open()))[1:]]
