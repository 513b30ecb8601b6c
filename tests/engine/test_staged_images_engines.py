"""Engines of models that see, in pipeline stages by keys of the config alone, against one process in float64."""

from __future__ import annotations

import gradient_rule
import image_models
import pipeline_rule as rule
import pytest
import tensor_parallel_rule as dense
import torch
from ranks import run_on_ranks
from tiny_models import Float64
from torch import nn

from ds_npu.parallel.pipeline.schedules import SCHEDULES

EXACT, SINGLE = rule.EXACT, rule.SINGLE


def frozen(kind: str, freezes: bool) -> nn.Module:
    """``freezes``: the vision tower, as most people train these models; DeepStack's features have no gradients then."""
    model = image_models.seeing(kind)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not freezes or "vis" not in name)
    return model


def reference(model: nn.Module, batch: dict[str, torch.Tensor]) -> gradient_rule.Reference:
    with Float64():
        loss = model(**batch).loss
        loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    norm = torch.cat([each.flatten() for each in gradients.values()]).norm().item()
    return gradient_rule.Reference(loss.item(), gradients, norm, {})


def hold(kind: str, zero: int, freezes: bool, section: dict) -> None:
    batch, plain = image_models.batch(kind), frozen(kind, freezes)
    expected = reference(plain, batch)
    engine = rule.engine_of(frozen(kind, freezes), zero, torch.float64, section)
    where = (kind, zero, freezes, section)
    for _ in range(rule.ACCUMULATION):
        with Float64():
            loss = engine(**batch).loss
        assert abs(loss.item() / expected.loss - 1) <= EXACT, where
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            gradients = gradient_rule.reduced_gradients(engine, engine.module)
        engine.step()
    named = dict(engine.module.named_parameters())
    found = rule.over_stages(
        {name: dense.assembled(engine.topology, named[name], each) for name, each in gradients.items()}, engine.topology
    )
    unused = found.keys() - expected.gradients.keys()
    assert found.keys() >= expected.gradients.keys() and not any(found[name].any() for name in unused), where
    error = gradient_rule.relative({name: found[name] for name in expected.gradients}, expected.gradients)
    assert error <= EXACT, (where, error)
    assert abs(float(engine.get_global_grad_norm()) / expected.norm - 1) <= (EXACT if zero == 0 else SINGLE), where
    if zero:
        return
    model = frozen(kind, freezes)
    model.load_state_dict(dense.shared(engine.whole_state_dict()))
    engine.eval()
    with Float64(), torch.no_grad():
        whole, mine = model.eval()(**batch), engine(**batch)
    seen = batch["attention_mask"].bool()
    torch.testing.assert_close(mine.logits[seen], whole.logits[seen], rtol=0, atol=1e-12)
    assert abs(mine.loss / whole.loss - 1) <= EXACT, where


def hold_all(*cases: tuple[str, int, bool, dict]) -> None:
    for case in cases:
        hold(*case)


def section(schedule: str, pipeline: int = 2, keys: dict | None = None, **parallel: object) -> dict:
    return {"parallel": {"pipeline": pipeline, **parallel}, "pipeline": {"schedule": schedule} | (keys or {})}


EARLY = {"split": [1, 3]}
"""The second stage adds features of DeepStack."""


def test_qwen3_vl():
    cases = [("qwen3_vl", 0, False, section("1f1b", keys=EARLY)), ("qwen3_vl", 1, True, section("zb_h1", keys=EARLY))]
    run_on_ranks(2, hold_all, *cases)


CASES = [
    (kind, zero, freezes, section(schedule, keys={"micro_batches": count}))
    for kind in image_models.KINDS
    for zero, freezes, count in ((0, False, 4), (1, True, 2), (2, False, 3))
    for schedule in ("1f1b", "zb_v")
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", image_models.KINDS)
def test_every_type(kind):
    run_on_ranks(2, hold_all, *[case for case in CASES if case[0] == kind], deadline_s=600.0)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_carry_features(schedule):
    keys: dict = {"virtual_stages": 2} if SCHEDULES[schedule].chunks is None else {}
    stages = 2 * (SCHEDULES[schedule].chunks or 2)
    keys |= EARLY if stages == 2 else {"split": [1, 1, 1, 1]}
    run_on_ranks(2, hold_all, ("qwen3_vl", 1, False, section(schedule, keys=keys)))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2"])
def test_four_stages_carry_features(schedule):
    run_on_ranks(4, hold_all, ("qwen3_vl", 1, False, section(schedule, 4)), deadline_s=600.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_with_tensor_ranks(kind):
    keys = EARLY if kind == "qwen3_vl" else {}
    run_on_ranks(4, hold_all, *[(kind, zero, False, section("1f1b", keys=keys, tensor=2)) for zero in (0, 1)])


def of_other_images(batches: list[dict]) -> None:
    """Data ranks of which one has no images."""
    plain = frozen("qwen3_vl", False)
    expected = [reference(frozen("qwen3_vl", False), each) for each in batches]
    names = [name for name, _ in plain.named_parameters()]
    zero = torch.zeros(())
    mean = {name: sum(each.gradients.get(name, zero) for each in expected) / 2 for name in names}
    for stage in (0, 1, 2):
        engine = rule.engine_of(frozen("qwen3_vl", False), stage, torch.float64, section("1f1b", keys=EARLY))
        for _ in range(rule.ACCUMULATION):
            with Float64():
                loss = engine(**batches[engine.topology.rank("dp")]).loss
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                found = gradient_rule.reduced_gradients(engine, engine.module)
            engine.step()
        whole = rule.over_stages(found, engine.topology)
        assert gradient_rule.relative({name: whole[name] for name in mean}, mean) <= EXACT, stage


@pytest.mark.slow
def test_a_data_rank_without_images():
    batch = image_models.batch("qwen3_vl")
    text = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    text["input_ids"] = text["input_ids"].clamp(max=59)
    run_on_ranks(4, of_other_images, [batch, text])
