"""Dropout and packed documents over pipeline stages: masks that no schedule changes, documents as in one process."""

from __future__ import annotations

import pipeline_rule as rule
import pytest
import tensor_parallel_rule as dense
import tiny_models
import torch
from gradient_rule import reduced_gradients, relative
from ranks import run_on_ranks
from tiny_models import Float64
from torch import nn

DROPPED = {"llama": {"attention_dropout": 0.3}, "gpt2": {"attn_pdrop": 0.3, "resid_pdrop": 0.2, "embd_pdrop": 0.2}}
ONE_STAGE = ("gpipe", "zb_h1", "zb_h2")
LENGTH = 24
ENDS = ((7, 12, 24), (3, 24), (24,), (1, 9, 10, 24))
"""Of the documents in each row."""


def section(schedule: str, pipeline: int = 2, **keys: object) -> dict:
    return {"parallel": {"pipeline": pipeline}, "pipeline": {"schedule": schedule, **keys}}


def dropped(family: str, pipeline: int, schedule: str, **keys: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of a step with dropout, whose random numbers begin alike."""
    model = rule.model_of(family, torch.float64, **DROPPED[family])
    engine = rule.engine_of(model, 1, torch.float64, section(schedule, pipeline, **keys))
    torch.manual_seed(11)
    losses, gradients = [], {}
    for index, step in enumerate(rule.batches(1)):
        loss = rule.loss_of(engine, step[0], torch.float64)
        losses.append(loss.item())
        engine.backward(loss)
        if index == rule.ACCUMULATION - 1:
            gradients = {name: each.clone() for name, each in reduced_gradients(engine, engine.module).items()}
        engine.step()
    return losses, gradients


def same_masks(family: str, pipeline: int) -> None:
    """Ranks with one stage run the forwards of micro-batches in their order: what a schedule changes is when."""
    losses, gradients = dropped(family, pipeline, "1f1b")
    for schedule in ONE_STAGE:
        found_losses, found = dropped(family, pipeline, schedule)
        assert found_losses == losses, schedule
        assert all(torch.equal(found[name], each) for name, each in gradients.items()), schedule
    other = dropped(family, pipeline, "1f1b", micro_batches=2)[0]
    assert other != losses, "masks are drawn for each micro-batch"


@pytest.mark.parametrize("family", DROPPED)
def test_schedules_drop_the_same(family):
    run_on_ranks(2, same_masks, family, 2, deadline_s=600.0)


@pytest.mark.slow
def test_four_stages_drop_the_same():
    run_on_ranks(4, same_masks, "llama", 4, deadline_s=600.0)


def packed() -> dict[str, torch.Tensor]:
    """Rows of documents, whose positions begin again at 0; the first token of a document is no label."""
    ids = tiny_models.tokens(len(ENDS), LENGTH)
    positions, labels = torch.zeros_like(ids), ids.clone()
    for row, ends in enumerate(ENDS):
        for begin, end in zip((0, *ends), ends, strict=False):
            positions[row, begin:end] = torch.arange(end - begin)
            labels[row, begin] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def expected_of(
    family: str, batches: list[dict[str, torch.Tensor]]
) -> tuple[float, dict[str, torch.Tensor], nn.Module]:
    """The mean of the losses of ``batches`` in one process, and its gradients."""
    plain, total = rule.model_of(family, torch.float64), 0.0
    for batch in batches:
        loss = rule.loss_of(plain, batch, torch.float64) / len(batches)
        loss.backward()
        total += loss.item()
    return total, {name: each.grad for name, each in plain.named_parameters()}, plain


def documents(family: str, schedule: str, count: int) -> None:
    batch = packed()
    loss, gradients, plain = expected_of(family, [batch])
    with Float64(), torch.no_grad():
        apart = plain(**{name: each for name, each in batch.items() if name != "position_ids"}).loss
    assert abs(apart - loss) > 1e-4, "documents see each other without positions"
    engine = rule.engine_of(
        rule.model_of(family, torch.float64), 1, torch.float64, section(schedule, micro_batches=count)
    )
    for _ in range(rule.ACCUMULATION):
        found = rule.loss_of(engine, batch, torch.float64)
        assert abs(found.item() / loss - 1) <= rule.EXACT, (family, schedule, count)
        engine.backward(found)
        if engine.is_gradient_accumulation_boundary():
            mine = reduced_gradients(engine, engine.module)
        engine.step()
    assert relative(rule.over_stages(mine, engine.topology), gradients) <= rule.EXACT, (family, schedule, count)


def rows_of_train_batch() -> None:
    """Padding-free batches of one row each are micro-batches of ``train_batch``."""
    batch = packed()
    rows = [{name: each[row : row + 1] for name, each in batch.items()} for row in range(rule.ACCUMULATION)]
    loss, _, plain = expected_of("llama", rows)
    engine = rule.engine_of(rule.model_of("llama", torch.float64), 0, torch.float64, section("zb_h1"))
    with Float64():
        found = engine.train_batch(iter(rows))
    assert abs(found.item() / loss - 1) <= rule.EXACT
    gradients = {name: each.grad for name, each in plain.named_parameters()}
    norm = torch.cat([each.flatten() for each in gradients.values()]).norm()
    scale = (dense.CLIP / (norm + 1e-6)).clamp(max=1)
    weights = {name: each.detach() - rule.LR * scale * gradients[name] for name, each in plain.named_parameters()}
    whole = dense.shared(engine.whole_state_dict())
    assert relative({name: whole[name].double() for name in weights}, weights) <= rule.EXACT


def documents_of(*cases: tuple[str, str, int]) -> None:
    for case in cases:
        documents(*case)


def test_packed_documents():
    run_on_ranks(2, documents_of, ("llama", "1f1b", 4), ("qwen3", "zb_v", 2), deadline_s=600.0)
    run_on_ranks(2, rows_of_train_batch)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "dualpipe_v"])
def test_packed_documents_in_every_family(schedule):
    cases = [(family, schedule, 4) for family in ("mistral", "qwen2", "gemma", "phi3", "gpt2")]
    run_on_ranks(2, documents_of, *cases, deadline_s=600.0)
