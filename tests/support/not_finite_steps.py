"""Training steps of a small model of which one is not finite, in the loss or in a gradient only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradient_rule
import torch
import torch.distributed as dist
from torch import nn

BAD_STEP = 2
BF16 = {"bf16": {"enabled": True}}
FP32_BUFFERS = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
UNREAD = {"bf16": {"enabled": True, "check_grad_overflow": False}}


class Exp(nn.Module):
    """Infinite for large inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()


class Root(nn.Module):
    """Its gradient is infinite at 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().sqrt()


class Model(nn.Module):
    """Three modules and a loss."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4, bias=False), middle, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x))).float().square().mean()


@dataclass
class Case:
    """A config of DeepSpeed, a stage of ZeRO, and clipping."""

    config: dict
    stage: int
    clipping: float = 1.0


SKIPPING = [Case({}, 1), Case({}, 2), Case({}, 3), Case(BF16, 0), Case(BF16, 1), Case(BF16, 3), Case(FP32_BUFFERS, 1)]
"""Where DeepSpeed skips a step that is not finite."""
UPDATING = [Case({}, 0), Case(UNREAD, 1), Case(UNREAD, 2)]
"""Where it does not look."""


def engine_of(case: Case, middle: nn.Module, finite: bool | str) -> Any:
    """An engine; ``finite``: the key, a folder to watch."""
    import deepspeed

    gradient_rule.without_extension()
    torch.manual_seed(0)
    model = Model(middle)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": case.clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": case.stage},
        "ds_npu": {"watch": {"finite": finite}},
        **case.config,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def take_step(engine: Any, case: Case, bad: float | None = None) -> None:
    """Two micro-batches, of which rank 1 has ``bad`` inputs in the second."""
    for micro in range(2):
        is_bad = bad is not None and micro == 1 and dist.get_rank() == 1
        dtype = torch.bfloat16 if case.config else torch.float32
        engine.backward(engine(torch.full((2, 4), bad if is_bad else 0.5, dtype=dtype, device=engine.device)))
        engine.step()


def train(case: Case, middle: nn.Module, bad: float, folder: str) -> tuple[str, list[bool]]:
    """What FloatingPointError says of a step with ``bad`` inputs, and of each weight whether that step moved it."""
    engine = engine_of(case, middle, folder)
    for _ in range(BAD_STEP):
        take_step(engine, case)
    before = weights_of(engine.module)
    try:
        take_step(engine, case, bad)
        # Where the host reads late.
        take_step(engine, case)
    except FloatingPointError as error:
        moved = [not torch.equal(one, other) for one, other in zip(before, weights_of(engine.module), strict=True)]
        return str(error), moved
    raise AssertionError(f"no error: {case}")


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    """Copies; of ZeRO 3 this rank's shards."""
    shards = [getattr(parameter, "ds_tensor", parameter) for parameter in model.parameters()]
    return [shard.detach().clone() for shard in shards]


def stops_before_the_update(cases: list[Case], folder: str) -> None:
    for case in cases:
        text, moved = train(case, Exp(), 1e5, folder)
        assert f"step {BAD_STEP + 1}: the loss is not finite" in text, text
        assert "rank 1: loss " in text and " in micro-batch 1" in text and "rank 0: loss" not in text, text
        assert "first module whose output is not finite: middle (Exp), on rank 1" in text, text
        assert "there, in the forward of micro-batch 1: aten.exp.default gave inf" in text, text
        assert f"the weights are those of step {BAD_STEP}" in text and not any(moved), (case, moved)
        text, moved = train(case, Root(), 0.0, folder)
        assert f"step {BAD_STEP + 1}: the gradient norm is not finite" in text, text
        assert "in the order of backward that is not finite: first.weight, on rank" in text, (case, text)
        assert "first module in backward whose gradients are not finite: middle (Root), on rank 1" in text, (case, text)
        assert "there, in the backward of micro-batch 1: aten.div.Tensor gave -inf, inf" in text, text
        assert not any(moved), (case, moved)


def stops_after_the_update(cases: list[Case], folder: str) -> None:
    for case in cases:
        text, moved = train(case, Root(), 0.0, folder)
        assert f"step {BAD_STEP + 1}: the gradient norm is not finite" in text, text
        assert "the weights were updated by it" in text and any(moved), text
        assert "first parameter in the order of backward that is not finite: " in text, text
