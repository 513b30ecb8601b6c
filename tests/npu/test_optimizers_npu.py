"""Optimizers that read whole weights are refused beside tensor ranks on NPUs, too; the trial runs on the host."""

from __future__ import annotations

import pytest
from ranks import run_on_ranks
from whole_weight_optimizers import Lamb


def refused() -> None:
    import deepspeed
    import gradient_rule as rule
    import tensor_parallel_rule as tensor_rule
    import tiny_models
    import torch

    rule.without_extension()
    config = tensor_rule.config(1, torch.bfloat16, {"parallel": {"tensor": 2}}) | {
        "zero_allow_untested_optimizer": True
    }
    config.pop("optimizer", None)
    for kind in (Lamb, torch.optim.Muon):
        model = tiny_models.tiny("llama", torch.float32).to(torch.bfloat16)
        matrices = [each for each in model.parameters() if each.dim() == 2]
        with pytest.raises(ValueError, match=r"^ds_npu\.parallel\.tensor: .* gives other numbers for parts"):
            deepspeed.initialize(model=model, optimizer=kind(matrices), config=config)


@pytest.mark.slow
def test_refused_over_tensor_ranks():
    run_on_ranks(2, refused, backend="hccl", sets_device=False)
