"""Losses that a script makes of the log-probabilities of tokens (TRL's SFTTrainer), in pipeline stages."""

from __future__ import annotations

from functools import partial

import gradient_rule
import pipeline_rule as rule
import pytest
import torch
from ranks import run_on_ranks
from test_staged_engines import SEQUENCES, section
from tiny_models import Float64
from trl.trainer.utils import add_fused_lm_head

SCORES = ("log_probs", "entropy", "is_top1")
SINGLE = 1e-6
"""Of gradients: TRL's head accumulates in float32, whatever the model."""


def scored(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    model = rule.model_of("llama", dtype, tie_word_embeddings=False)
    add_fused_lm_head(model, outputs=SCORES)
    return model


def likelihood(engine, batch: dict[str, torch.Tensor], dtype: torch.dtype, seen: list) -> torch.Tensor:
    with Float64():
        out = engine(**batch, fused_lm_head=True)
    seen.append((batch, out))
    return -out.log_probs.sum() / torch.as_tensor(out.label_mask.sum()).clamp(min=1)


def hold_scores(batch: dict[str, torch.Tensor], out, model: torch.nn.Module) -> None:
    with torch.no_grad(), Float64():
        plain = model(**batch, fused_lm_head=True)
    assert type(out) is type(plain)
    assert torch.equal(out.label_mask, plain.label_mask) and torch.equal(out.is_top1, plain.is_top1)
    for name in ("loss", "log_probs", "entropy"):
        torch.testing.assert_close(out[name].detach(), plain[name], rtol=SINGLE, atol=SINGLE)


def train(schedule: str, parallel: dict, ranks: int) -> None:
    wanted = section(2, schedule, **parallel)
    if schedule == "1f1b":
        wanted["pipeline"]["recompute"] = "inline"
    dp = ranks // (2 * parallel.get("tensor", 1) * parallel.get("context", 1))
    expected = rule.reference(scored(), dp, torch.float64)
    for zero in (0, 2):
        engine, seen = rule.engine_of(scored(), zero, torch.float64, wanted), []
        loss, gradients = rule.step_of(engine, torch.float64, partial(likelihood, seen=seen))
        assert abs(loss / expected.loss - 1) <= SINGLE
        assert gradient_rule.relative(gradients, expected.gradients) <= SINGLE, (schedule, parallel, zero)
        for batch, out in seen:
            hold_scores(batch, out, scored())
    with torch.no_grad():
        hold_scores(batch, likelihoods_of_evaluation(engine, batch), scored_as(engine))


def likelihoods_of_evaluation(engine, batch: dict[str, torch.Tensor]):
    engine.eval()
    with Float64():
        return engine(**batch, fused_lm_head=True)


def scored_as(engine) -> torch.nn.Module:
    """The plain model with the weights of ``engine``."""
    whole = rule.dense.shared(engine.whole_state_dict())
    model = scored()
    model.load_state_dict({name: each.double() for name, each in whole.items()})
    return model.eval()


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(
    ("schedule", "parallel", "ranks"),
    [
        ("1f1b", {}, 2),
        ("zb_v", {"tensor": 2}, 4),
        ("zb_h1", SEQUENCES, 4),
        ("interleaved", {"context": 2}, 4),
        ("1f1b", {"tensor": 2}, 4),
        ("zb_h2", {}, 4),
    ],
    ids=str,
)
def test_the_sum_of_log_probabilities_is_trained_on(schedule, parallel, ranks):
    run_on_ranks(ranks, train, schedule, parallel, ranks, deadline_s=600.0)


def refuse() -> None:
    (((batch,), *_),) = (rule.batches(1),)
    engine = rule.engine_of(scored(torch.float32), 1, torch.float32, section(2))
    out = engine(**batch, fused_lm_head=True)
    weighed = (out.log_probs * torch.arange(out.log_probs.numel()).view_as(out.log_probs)).sum()
    with pytest.raises(ValueError, match="the loss weighs the log-probabilities of tokens differently"):
        engine.backward(weighed)
    out = engine(**batch, fused_lm_head=True)
    with pytest.raises(ValueError, match="the loss is made of other scores than log-probabilities"):
        engine.backward(-out.log_probs.sum() + out.entropy.sum())
    out = engine(**batch, fused_lm_head=True)
    engine.backward(-out.log_probs.sum())
    unlabelled = batch | {"labels": torch.full_like(batch["labels"], -100)}
    out = engine(**unlabelled, fused_lm_head=True)
    engine.backward(-out.log_probs.sum())
    engine.step()
    assert all(weight.isfinite().all() for weight in engine.module.parameters())


def test_other_losses_are_refused_before_the_step():
    run_on_ranks(2, refuse)
