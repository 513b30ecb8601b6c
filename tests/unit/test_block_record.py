"""What a recorded step says of other ways to keep activations, against steps that keep them so."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from torch import nn

from ds_npu.config.sections import DsNpuConfig
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features, values_in
from ds_npu.features.recompute.recorded_steps import RecordedSteps
from ds_npu.memory.storage_record import StorageMeter, StorageRecord
from ds_npu.parallel.runtime.forward_wraps import has_own_forward
from ds_npu.planner.memory_plan import Option, measured
from ds_npu.planner.memory_plan_table import ATTENTION, MLP, WHOLE, StagePlan, section_of
from ds_npu.topology.machine import A2

ONE_RANK = SimpleNamespace(size=lambda *axes: 1, rank=lambda *axes: 0)
LAYERS = 3
ROUNDING = 600
"""Bytes that the record counts more for a storage, at most."""
WIDE = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": LAYERS}
SIZES = {"llama": WIDE, "qwen3_moe": WIDE, "gpt2": {"n_embd": 64, "n_layer": LAYERS}}


def model_of(family: str) -> nn.Module:
    model = tiny_models.tiny(family, torch.float32, attn_implementation="sdpa", **SIZES[family])
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    return model


def held(family: str, section: dict[str, object]) -> tuple[int, int]:
    """Bytes that a forward keeps, and the most of a forward and backward."""
    model = model_of(family)
    apply_features(values_in(DsNpuConfig.model_validate(section)), Build(ONE_RANK, model))
    ids, record = tiny_models.tokens(4, 32), StorageRecord("cpu", lambda: "")
    meter = StorageMeter(record)
    with record:
        loss = model(input_ids=ids, labels=ids).loss
        gc.collect()
        kept = sum(change.size for change in record.changes)
        loss.backward()
    return kept, meter.peak()


def recorded(family: str) -> tuple[RecordedSteps, nn.Module]:
    model = model_of(family)
    record = StorageRecord("cpu", lambda: "")
    steps = RecordedSteps(Build(ONE_RANK, model), StorageMeter(record), A2)
    steps.wrap()
    ids = tiny_models.tokens(4, 32)
    with record:
        model(input_ids=ids, labels=ids).loss.backward()
        steps.end_of_backward()
    return steps, model


@pytest.mark.parametrize("family", SIZES)
def test_what_each_option_keeps_and_needs_is_what_it_was_said_to(family):
    steps, model = recorded(family)
    layers, moments = steps.layers, steps.moments
    modules = {each.name: {part: steps.modules(each.name, part) for part in (ATTENTION, MLP)} for each in layers}
    base, _ = held(family, {"recompute": {"layers": "all"}})
    every = dict.fromkeys(option.parts for layer in layers for option in layer.options)
    assert len(every) == 13 and all(layer.options[0].parts == (WHOLE,) for layer in layers)
    for parts in every:
        options: list[Option] = []
        for layer in layers:
            own = {option.parts: option for option in layer.options}
            options.append(own.get(parts) or own[tuple(each for each in parts if each != "activation_function")])
        plan = measured(layers, moments, options)
        section = section_of([StagePlan(0, layers, moments, modules, plan)])
        kept, peak = held(family, section)
        said = sum(o.kept_bytes - layer.options[0].kept_bytes for o, layer in zip(options, layers, strict=True))
        where = (parts, section, said, kept - base, plan.peak_bytes, peak)
        assert kept - base <= said + ROUNDING <= kept - base + 60 * LAYERS * ROUNDING, where
        # An upper bound: a block that is computed again as a whole needs more at once than its parts.
        assert peak <= plan.peak_bytes + ROUNDING <= 1.25 * peak + 60 * ROUNDING, where
    steps.unwrap()
    assert not any(has_own_forward(module) for module in model.modules())


def test_more_computed_again_takes_longer():
    steps, _ = recorded("llama")
    seconds = {option.parts: option.seconds for option in steps.layers[1].options}
    assert (
        seconds[()] == 0 < seconds[("norm",)] < seconds[("attention", "norm")] < seconds[("attention", "mlp", "norm")]
    )
    assert 0 < seconds[("activation_function",)] < seconds[("mlp",)] < seconds[(WHOLE,)]
