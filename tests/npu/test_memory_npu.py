"""``chunked_loss`` and ``recompute`` in DeepSpeed's engine over simulated NPUs: numbers, and waits of the host."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import deepspeed
import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
from host_waits import HostWaits, check_no_wait
from ranks import run_on_ranks

from ds_npu.memory.recomputation import Recomputation
from ds_npu.parallel.tensor import chunked_loss

CHUNKED = {"chunked_loss": 4}
RECOMPUTE: list[dict[str, object]] = [
    {"norm": True, "activation_function": True},
    {"layers": "all"},
    {"layers": 2, "method": "uniform"},
    {"attention_core": True},
    {"layers": "all", "keep": ["matmul", "attention"]},
]
SEQUENCE = {"tensor": 2, "sequence_parallel": True}


def chunked_steps(cases: list[tuple[str, dict[str, object], int]]) -> None:
    """bf16 within twice the error of one process."""
    rule.without_extension()
    for family, parallel, stage in cases:
        dp = 2 // (parallel.get("tensor", 1) * parallel.get("context", 1))
        expected = tensor_rule.reference(family, dp, dtype=torch.float64, start=torch.bfloat16)
        section = {"parallel": parallel} | CHUNKED
        # The engine first: nothing here sets the device.
        with mock.patch.object(chunked_loss, "_chunk", wraps=chunked_loss._chunk) as chunk:
            errors = tensor_rule.engine_step(family, stage, torch.bfloat16, section, expected)
        single = tensor_rule.reference(family, dp, dtype=torch.bfloat16, start=torch.bfloat16, device="npu")
        bound = 2 * rule.relative(single.gradients, expected.gradients)
        where = (family, parallel, stage, errors, bound)
        assert max(errors.gradient, errors.norm) <= bound and errors.loss <= 4e-3, where
        tokens = rule.MICRO * tensor_rule.LENGTH // parallel.get("context", 1)
        assert chunk.call_count == rule.ACCUMULATION * -(-tokens // CHUNKED["chunked_loss"]), where


def test_chunked_losses_are_as_exact_as_one_processs():
    cases = [("llama", {}, 1), ("gemma2", {"tensor": 2}, 3), ("gemma2", SEQUENCE, 1)]
    run_on_ranks(2, chunked_steps, cases, backend="hccl", sets_device=False)


@dataclass
class Run:
    """Two steps of an engine."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    """Of the second step, in which ``waits`` are counted."""
    waits: list[str]
    engine: deepspeed.DeepSpeedEngine


def trained(family: str, stage: int, section: dict[str, object]) -> Run:
    """In bf16; what drops draws the same numbers at every call."""
    changes = {"attn_pdrop": 0.3, "resid_pdrop": 0.1} if family == "gpt2" else {"attention_dropout": 0.3}
    if "context" in section["parallel"]:
        changes = {}
    model = tiny_models.tiny(family, torch.float32, **changes).to(torch.bfloat16)
    config = tensor_rule.config(stage, torch.bfloat16, section)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    torch.manual_seed(7)
    losses, waits = [], HostWaits()
    for tokens in tensor_rule.batches(2 * rule.MICRO * rule.ACCUMULATION).chunk(2):
        waits.found.clear()
        for index, micro in enumerate(tokens.to(engine.device).split(rule.MICRO)):
            with waits:
                loss = engine(input_ids=micro, labels=micro).loss
                engine.backward(loss)
            losses.append(loss.detach())
            if index == rule.ACCUMULATION - 1:
                gradients = rule.reduced_gradients(engine, model)
            with waits:
                engine.step()
    return Run(losses, gradients, waits.found, engine)


def same(found: Run, expected: Run) -> bool:
    gradients = [found.gradients[name] for name in expected.gradients]
    pairs = zip([*found.losses, *gradients], [*expected.losses, *expected.gradients.values()], strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def runs(cases: list[tuple[str, dict[str, object], int]]) -> None:
    """Each waits as often as the run without, for transformers and ZeRO."""
    rule.without_extension()
    again = mock.patch.object(Recomputation, "_compute", autospec=True, side_effect=Recomputation._compute)
    for family, parallel, stage in cases:
        expected = trained(family, stage, {"parallel": parallel})
        assert len(expected.waits) > 2, "the counter finds nothing"
        for section in (CHUNKED, *({"recompute": each} for each in RECOMPUTE)):
            with again as compute:
                found = trained(family, stage, {"parallel": parallel} | section)
            where = (family, section)
            assert found.waits == expected.waits, (where, found.waits, expected.waits)
            # ZeRO 3 waits in backward.
            if stage == 1:
                check_no_wait(found.engine)
            if section is not CHUNKED:
                assert compute.called and same(found, expected), where


def runs_on_other_axes(family: str, parallel: dict[str, object], stage: int) -> None:
    """Those without, to the bit; experts are sent again, for which the host waits again."""
    rule.without_extension()
    expected = trained(family, stage, {"parallel": parallel})
    for recompute in RECOMPUTE:
        assert same(trained(family, stage, {"parallel": parallel, "recompute": recompute}), expected), recompute


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parallel", "stage"),
    [("llama", {"context": 2}, 1), ("qwen3_moe", {"expert": 2}, 2), ("llama", {"pipeline": 2}, 1)],
    ids=str,
)
def test_recomputed_runs_on_other_axes_are_those_without_to_the_bit(family, parallel, stage):
    run_on_ranks(2, runs_on_other_axes, family, parallel, stage, backend="hccl", sets_device=False, deadline_s=600.0)


@pytest.mark.slow
def test_chunked_losses_over_context_and_expert_ranks():
    cases = [("llama", {"context": 2}, 1), ("qwen3_moe", {"expert": 2}, 1)]
    run_on_ranks(2, chunked_steps, cases, backend="hccl", sets_device=False, deadline_s=600.0)


def test_recomputed_runs_are_those_without_to_the_bit_and_the_host_waits_no_more_often():
    run_on_ranks(2, runs, [("gpt2", {}, 3), ("llama", SEQUENCE, 1)], backend="hccl", sets_device=False)
