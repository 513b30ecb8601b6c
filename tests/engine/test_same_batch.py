"""Tensor ranks that are given different samples are told so, once, before anything is computed."""

from __future__ import annotations

import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks


def forwards(differ: bool) -> None:
    import deepspeed

    rule.without_extension()
    model = tiny_models.tiny("llama", torch.float32)
    config = tensor_rule.config(1, torch.float32, {"parallel": {"tensor": 2}})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ids = tiny_models.tokens(2, 8) + (dist.get_rank() if differ else 0)
    if not differ:
        hooks = set(model._forward_pre_hooks)
        engine(input_ids=ids, labels=ids)
        assert len(hooks - set(model._forward_pre_hooks)) == 1
        return
    with pytest.raises(RuntimeError, match=r"parallel\.tensor is 2, and its ranks .* rank 1 has .* rank 0 has"):
        engine(input_ids=ids, labels=ids)


def test_different_batches_are_refused():
    run_on_ranks(2, forwards, True)


@pytest.mark.slow
def test_the_first_forward_looks_and_no_other():
    run_on_ranks(2, forwards, False)
