"""Lives of one model under ZeRO 1 and 2, in buckets or by DeepSpeed's own code, and all numbers of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gradient_rule
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, DEPTH, MICRO = 12, 4, 2
PLAIN = {"overlap_comm": False}
"""DeepSpeed's own reductions and gathers."""
Numbers = list[torch.Tensor]


class Stack(nn.Module):
    """Layers of which ``shared`` is used twice, and ``spare`` by batches that say so; ``reentrant`` recomputes them."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, uses_spare: bool = False) -> torch.Tensor:
        x = self.first(x).tanh()
        for index, layer in enumerate(self.layers):
            body = self.layer_with_shared if index in (0, DEPTH - 1) else layer
            args = (layer, x) if index in (0, DEPTH - 1) else (x,)
            x = (checkpoint(body, *args, use_reentrant=True) if self.reentrant else body(*args)).tanh()
        return (self.spare(x) if uses_spare else x).square().mean()

    def layer_with_shared(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.shared(layer(x).tanh())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Groups of an optimizer, as the Trainer makes them: vectors do not decay."""
    matrices, vectors = ([each for each in model.parameters() if (each.dim() > 1) is wide] for wide in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]


@dataclass(frozen=True)
class Life:
    """What an engine is made of, and what happens to it."""

    live: Callable[[Any], Numbers]
    stage: int = 1
    dtype: torch.dtype = torch.float32
    accumulation: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    reentrant: bool = False

    def engine(self, zero: dict[str, Any], seed: int = 0) -> Any:
        torch.manual_seed(seed)
        model = Stack(self.reentrant)
        return self.engine_of(model.double() if self.dtype == torch.float64 else model, zero)

    def engine_of(self, model: nn.Module, zero: dict[str, Any]) -> Any:
        import deepspeed

        gradient_rule.without_extension()
        config = {
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 0.01,
            "zero_optimization": {"stage": self.stage, **zero},
            "bf16": {"enabled": self.dtype == torch.bfloat16},
            # DeepSpeed rounds each product of a weight that is used twice.
            "ds_npu": {"fused_ops": {"matmul_accumulate": False}},
            **self.config,
        }
        optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return engine


def batch(engine: Any, step: int, micro: int) -> torch.Tensor:
    """This rank's micro-batch."""
    seed = (step * 16 + micro) * 16 + dist.get_rank()
    x = torch.randn(MICRO, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x.to(engine.device, next(engine.module.parameters()).dtype)


def steps(engine: Any, count: int = 2, first: int = 0, between: Callable[[], object] = lambda: None) -> Numbers:
    """Take steps; losses and norms."""
    found = []
    for step in range(first, first + count):
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(batch(engine, step, micro))
            found.append(loss.detach().clone())
            engine.backward(loss)
            between()
            engine.step()
        found.append(torch.as_tensor(engine.get_global_grad_norm()).float())
    return found + weights(engine)


def weights(engine: Any) -> Numbers:
    """Weights, masters and their states, whole."""
    found = []
    for weight in engine.module.parameters():
        states = [safe_get_full_fp32_param(weight)]
        if engine.global_steps:
            states += [safe_get_full_optimizer_state(weight, key) for key in ("exp_avg", "exp_avg_sq")]
        found += [weight.detach().clone(), *(each.clone() for each in states)]
    return found


def without_sync(engine: Any) -> Numbers:
    for step in range(2):
        with engine.no_sync():
            for micro in range(3):
                engine.backward(engine(batch(engine, step, micro)))
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(batch(engine, step, 3)))
        engine.step()
    return weights(engine)


def boundaries_set(engine: Any) -> Numbers:
    for step, micros in enumerate((1, 3, 2)):
        for micro in range(micros):
            engine.set_gradient_accumulation_boundary(micro == micros - 1)
            engine.backward(engine(batch(engine, step, micro)))
            engine.step()
    return weights(engine)


def read_and_set(engine: Any) -> Numbers:
    """Full values are read between a backward and its step, and set."""
    found: Numbers = []

    def look() -> None:
        if not engine.is_gradient_accumulation_boundary():
            return
        for index, weight in enumerate(engine.module.parameters()):
            gradient = safe_get_full_grad(weight)
            found.append(gradient.clone())
            if index % 2:
                safe_set_full_grad(weight, gradient * 0.5)

    found += steps(engine, between=look)
    for weight in engine.module.parameters():
        safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight) + 0.125)
        state = safe_get_full_optimizer_state(weight, "exp_avg")
        safe_set_full_optimizer_state(weight, state * 2, "exp_avg")
    engine.optimizer.update_lp_params()
    return found + weights(engine) + steps(engine, first=2)


def values_read(engine: Any) -> Numbers:
    """A script looks at weights, evaluates and generates between steps."""
    found = steps(engine)
    found += [weight.data.norm() for weight in engine.module.parameters()]
    with torch.no_grad():
        found.append(engine.module(batch(engine, 9, 0)))
    found += steps(engine, 1, first=2)
    engine.eval()
    with torch.no_grad():
        found.append(engine(batch(engine, 9, 1)))
    engine.train()
    found += [each.clone() for each in engine.module.state_dict().values()]
    return found + steps(engine, 1, first=3)


def refreshed(engine: Any) -> Numbers:
    """A script changes weights, and lets the optimizer know."""
    found = steps(engine)
    with torch.no_grad():
        for weight in engine.module.parameters():
            weight.mul_(0.5)
    engine.optimizer.refresh_fp32_params()
    return found + weights(engine) + steps(engine, first=2)


def not_finite(engine: Any) -> Numbers:
    """One micro-batch of rank 1 has an infinite gradient."""
    found = []
    for step in range(3):
        for micro in range(2):
            x = batch(engine, step, micro)
            bad = step == 1 and micro == 0 and dist.get_rank() == 1
            engine.backward(engine(x) * (float("inf") if bad else 1.0))
            engine.step()
        found.append(torch.tensor(engine.skipped_steps))
    return found + weights(engine)


def frozen(engine: Any) -> Numbers:
    """A layer is frozen after a step."""
    found = steps(engine, 1)
    engine.module.first.requires_grad_(False)
    return found + steps(engine, 2, first=1)


def kept_graph(engine: Any) -> Numbers:
    """A graph of before a step is used behind it."""
    found = steps(engine, 1)
    kept = engine(batch(engine, 5, 0))
    for micro in range(2):
        engine.backward(engine(batch(engine, 1, micro)))
        engine.step()
    engine.backward(kept)
    engine.step()
    engine.backward(engine(batch(engine, 2, 0)))
    engine.step()
    return found + weights(engine)


def moved(engine: Any) -> Numbers:
    """States are on the host for a while."""
    found = steps(engine)
    engine.offload_states(pin_memory=False)
    engine.reload_states()
    # DeepSpeed finds no optimizer state of weights any more (0.19.8).
    engine.backward(engine(batch(engine, 2, 0)))
    engine.step()
    engine.backward(engine(batch(engine, 2, 1)))
    engine.step()
    return found + [weight.detach().clone() for weight in engine.module.parameters()]


LIVES = {
    "ZeRO 1": Life(steps),
    "ZeRO 2": Life(steps, stage=2),
    "ZeRO 1, bf16": Life(steps, dtype=torch.bfloat16),
    "ZeRO 2, bf16": Life(steps, stage=2, dtype=torch.bfloat16),
    "ZeRO 2, bf16, gradients in float32": Life(
        steps, stage=2, dtype=torch.bfloat16, config={"data_types": {"grad_accum_dtype": "fp32"}}
    ),
    "ZeRO 1, one micro-batch": Life(steps, accumulation=1),
    "no_sync": Life(without_sync),
    "boundaries": Life(boundaries_set, accumulation=1),
    "boundaries, ZeRO 2": Life(boundaries_set, stage=2, accumulation=1),
    "full values": Life(read_and_set),
    "full values, ZeRO 2, bf16": Life(read_and_set, stage=2, dtype=torch.bfloat16),
    "values read": Life(values_read),
    "refreshed": Life(refreshed, dtype=torch.bfloat16),
    "not finite": Life(not_finite),
    "frozen": Life(frozen),
    "moved": Life(moved),
    "a graph is kept": Life(kept_graph),
    "reentrant": Life(steps, reentrant=True),
}
