"""Pipeline stages in bfloat16: within twice the error of one process."""

from __future__ import annotations

import gradient_rule as rule
import pytest
import torch
from pipeline_rule import ACCUMULATION, batches, engine_of, model_of, over_stages, reference
from ranks import run_on_ranks

BOTH = {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "zb_h1"}}


def one_process(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Gradients that one process adds up in ``dtype``, of the same micro-batches."""
    model = model_of("llama", dtype)
    for batch in (step[0] for step in batches(1)):
        items = (batch["labels"][:, 1:] != -100).sum()
        for index in range(len(batch["labels"])):
            part = {name: each[index : index + 1] for name, each in batch.items()}
            (model(**part, num_items_in_batch=items).loss / ACCUMULATION).backward()
    return {name: weight.grad.double() for name, weight in model.named_parameters()}


def bfloat16() -> None:
    expected = reference(model_of("llama", torch.bfloat16).double(), 1, torch.float64)
    bound = 2 * rule.relative(one_process(torch.bfloat16), expected.gradients)
    for stage, more in ((0, {}), (1, {}), (2, {}), (1, {"data_types": {"grad_accum_dtype": "fp32"}})):
        engine = engine_of(model_of("llama", torch.bfloat16), stage, torch.bfloat16, BOTH, **more)
        kind = type(engine.optimizer).__name__
        for index, step in enumerate(batches(1)):
            engine.backward(engine(**step[0]).loss)
            if index == ACCUMULATION - 1 and kind != "BF16_Optimizer":
                gradients = over_stages(rule.reduced_gradients(engine, engine.module), engine.topology)
                assert rule.relative(gradients, expected.gradients) <= bound, (stage, more, kind)
            engine.step()
        norm = float(engine.get_global_grad_norm())
        assert abs(norm / expected.norm - 1) <= bound, (stage, more, kind, norm, expected.norm)


@pytest.mark.slow
def test_bfloat16():
    run_on_ranks(2, bfloat16)
