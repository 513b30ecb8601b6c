"""Models whose weights are float64 on NPUs, which have neither products nor sums over ranks of that dtype."""

from __future__ import annotations

import deepspeed
import pytest
import torch
from ranks import run_on_ranks
from torch import nn

pytestmark = pytest.mark.slow
BF16 = {"bf16": {"enabled": True}}


def trained(wide: bool, stage: int, more: dict[str, object]) -> list[torch.Tensor]:
    """Losses of three steps, and the weights after them; ``wide`` makes the same model in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "ds_npu": {},
    }
    engine, *_ = deepspeed.initialize(model=model.double() if wide else model, config=config | more)
    losses = []
    for _ in range(3):
        dtype = torch.bfloat16 if more else torch.float64
        loss = engine(torch.randn(2, 8).to(engine.device, dtype)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().cpu())
    with deepspeed.zero.GatheredParameters([*engine.module.parameters()]):
        return losses + [weight.detach().cpu().clone() for weight in engine.module.parameters()]


def in_bf16() -> None:
    for stage in (0, 1, 2, 3):
        found, expected = trained(True, stage, BF16), trained(False, stage, BF16)
        assert all(map(torch.equal, found, expected)), (stage, found, expected)


def test_what_bf16_casts_is_trained_as_ever():
    run_on_ranks(2, in_bf16, backend="hccl", sets_device=False)


def as_it_is() -> None:
    said = r"4 weights of Sequential are float64 \(0\.weight is the first\), which NPUs .* call model\.float\(\)"
    for stage in (0, 3):
        with pytest.raises(ValueError, match=said):
            trained(True, stage, {})


def test_float64_is_refused_before_the_first_step():
    run_on_ranks(1, as_it_is, backend="hccl", sets_device=False)
