"""A plan for a budget against plans that are set by hand, of a Llama of 12 blocks: bytes and operators are counted.

Each plan is followed in a step. What the operators that run in it would take on an NPU adds up to its time, whatever
the planner expected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny_models
import torch

from ds_npu.config.sections import DsNpuConfig
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features, values_in
from ds_npu.features.recompute.recorded_steps import RecordedSteps
from ds_npu.memory.operator_seconds import OperatorSeconds
from ds_npu.memory.storage_record import StorageMeter, StorageRecord
from ds_npu.planner.memory_plan import best_plan, fastest, measured, smallest
from ds_npu.planner.memory_plan_table import ATTENTION, MLP, StagePlan, section_of
from ds_npu.topology.machine import A2

LAYERS, HIDDEN, WITHIN = 12, 64, 1.03
ONE_RANK = SimpleNamespace(size=lambda *axes: 1, rank=lambda *axes: 0)
"""A topology without process groups."""
SLOWER = 4096 / HIDDEN
"""Products take as long, beside what reads and writes memory, as with hidden states of 4096."""
MACHINE = replace(
    A2,
    kernel=1e-12,
    matmul=A2.matmul / SLOWER,
    attention=tuple((keys, rate / SLOWER) for keys, rate in A2.attention),
)
BY_HAND: dict[str, Callable[[list[str]], dict[str, object]]] = {
    "norm": lambda first: {"norm": first},
    "activation_function": lambda first: {"activation_function": first},
    "both": lambda first: {"norm": first, "activation_function": first},
    "attention": lambda first: {"modules": [f"{each}.self_attn" for each in first]},
    "mlp": lambda first: {"modules": [f"{each}.mlp" for each in first]},
    "attention, both": lambda first: {
        "modules": [f"{each}.self_attn" for each in first],
        "norm": first,
        "activation_function": first,
    },
    "block": lambda first: {"modules": first},
    "keep matmul": lambda first: {"modules": first, "keep": ["matmul"]},
    "keep both": lambda first: {"modules": first, "keep": ["matmul", "attention"]},
}


def build_of(recompute: dict[str, object]) -> Build:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 176, "num_hidden_layers": LAYERS}
    model = tiny_models.tiny("llama", torch.float32, attn_implementation="sdpa", **sizes)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    build = Build(ONE_RANK, model)
    apply_features(values_in(DsNpuConfig.model_validate({"recompute": recompute})), build)
    return build


def step(model: torch.nn.Module) -> None:
    ids = tiny_models.tokens(4, 32)
    model(input_ids=ids, labels=ids).loss.backward()


def followed(recompute: dict[str, object]) -> tuple[int, float]:
    """The most bytes of a step, and the seconds of its operators."""
    record, seconds, model = StorageRecord("cpu", lambda: ""), [], build_of(recompute).model
    meter = StorageMeter(record)
    with OperatorSeconds(MACHINE, seconds.append), record:
        step(model)
    return meter.peak(), sum(seconds)


@pytest.mark.slow
def test_a_plan_is_within_3_percent_of_the_best_one_by_hand():
    build, record = build_of({}), StorageRecord("cpu", lambda: "")
    steps = RecordedSteps(build, StorageMeter(record), MACHINE)
    steps.wrap()
    with record:
        step(build.model)
        steps.end_of_backward()
    layers, moments = steps.layers, steps.moments
    modules = {each.name: {part: steps.modules(each.name, part) for part in (ATTENTION, MLP)} for each in layers}
    low, high = (measured(layers, moments, list(map(choose, layers))).peak_bytes for choose in (smallest, fastest))
    by_hand = {
        (kind, count): followed(make([f"model.layers.{place}" for place in range(count)]))
        for kind, make in BY_HAND.items()
        for count in (*range(2, LAYERS, 3), LAYERS)
    }
    _, free = followed({})
    for share in (0.15, 0.35, 0.6, 0.85):
        budget = int(low + share * (high - low))
        plan = best_plan(layers, moments, budget)
        peak, seconds = followed(section_of([StagePlan(0, layers, moments, modules, plan)]).get("recompute", {}))
        fit = {name: taken for name, (size, taken) in by_hand.items() if size <= budget}
        best = min(fit, key=fit.__getitem__)
        print(
            f"{share}: {len(fit)} fit, {best} {fit[best] / free:.4f} of nothing's time, the plan {seconds / free:.4f}"
        )
        assert peak <= budget and seconds <= WITHIN * fit[best], (share, best, seconds, fit[best])
