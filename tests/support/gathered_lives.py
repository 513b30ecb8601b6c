"""Lives of one model under ZeRO 3, whose weights are gathered by a plan or by DeepSpeed's own code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from bucketed_lives import WIDTH, Life, Numbers, batch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param
from torch.utils.checkpoint import checkpoint

from ds_npu.zero_ext.weight_gathers import COORDINATOR, GATHERS

SMALL = {"stage3_param_persistence_threshold": WIDTH, "stage3_max_reuse_distance": 0}
"""Biases stay gathered, and nothing else does where nothing else is said."""


def gathers_of(engine: Any) -> Any:
    return getattr(engine.optimizer.parameter_offload, COORDINATOR)


def whole(engine: Any) -> Numbers:
    """Weights and masters, whole."""
    found = []
    for weight in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([weight]):
            found.append(weight.detach().clone())
        if weight.requires_grad:
            found.append(safe_get_full_fp32_param(weight).clone())
    return found


def steps(
    engine: Any, count: int = 3, first: int = 0, forward: Callable[..., Any] | None = None, between: Any = None
) -> Numbers:
    found = []
    for step in range(first, first + count):
        for micro in range(engine.gradient_accumulation_steps()):
            x = batch(engine, step, micro)
            loss = forward(engine, x, step) if forward else engine(x)
            engine.backward(loss)
            found.append(loss.detach().clone())
            if between:
                between(engine, found)
            engine.step()
        found.append(torch.as_tensor(engine.get_global_grad_norm()).float())
    return found + whole(engine)


def other_layers(engine: Any) -> Numbers:
    """In some steps all ranks use one layer more."""
    return steps(engine, 7, forward=lambda engine, x, step: engine(x, step in (2, 5, 6)))


def evaluated(engine: Any) -> Numbers:
    """Losses without a backward, of the engine and of the model, before all steps and between them."""
    found = []
    for step in range(3):
        with torch.no_grad():
            found += [engine(batch(engine, 9, step)), engine.module(batch(engine, 8, step))]
            found.append(engine.module.first(batch(engine, 7, step)))
        found += whole(engine)
        found += steps(engine, 1, first=step)
    return found


def two_forwards(engine: Any) -> Numbers:
    return steps(engine, forward=lambda engine, x, step: engine(x) + engine(x * 0.5))


def read_between(engine: Any) -> Numbers:
    def look(engine: Any, found: Numbers) -> None:
        found += [safe_get_full_grad(weight).clone() for weight in engine.module.parameters() if weight.requires_grad]
        found += whole(engine)
        # DeepSpeed writes the master alone; the weight follows in the step.
        for weight in engine.module.layers.parameters():
            safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight) + 0.125)

    return steps(engine, between=look)


def changed(engine: Any) -> Numbers:
    """Rank 0 changes weights between two micro-batches."""

    def change(engine: Any, found: Numbers) -> None:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            if dist.get_rank() == 0:
                with torch.no_grad():
                    for weight in engine.module.parameters():
                        weight.mul_(0.75)

    return steps(engine, between=change)


def caught(engine: Any) -> Numbers:
    """A forward raises in the middle, and the script goes on."""
    found = steps(engine, 2)
    for step in (2, 3):
        handle = engine.module.layers[1].register_forward_pre_hook(fail)
        with suppress(ArithmeticError):
            engine(batch(engine, step, 0))
        handle.remove()
        found += steps(engine, 1, first=step)
    return found


def fail(*_: object) -> None:
    raise ArithmeticError("on purpose")


def without_sync(engine: Any) -> Numbers:
    for step in range(3):
        engine.set_gradient_accumulation_boundary(False)
        for micro in range(3):
            engine.set_gradient_accumulation_boundary(micro == 2)
            engine.backward(engine(batch(engine, step, micro)))
            engine.step()
    return whole(engine)


def frozen(engine: Any) -> Numbers:
    found = steps(engine, 2)
    engine.module.first.requires_grad_(False)
    return found + steps(engine, 2, first=2)


def recomputed_reentrantly(engine: Any) -> Numbers:
    return recomputed(engine, is_reentrant=True)


def recomputed(engine: Any, is_reentrant: bool = False) -> Numbers:
    """A frozen layer among them: the weights of one that is computed again are released behind that."""
    engine.module.layers[1].requires_grad_(False)
    for layer in engine.module.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=is_reentrant)
    return steps(engine)


def kept(engine: Any) -> Numbers:
    """Some weights stay gathered from a step on, as budget_gib says."""
    found = steps(engine, 2)
    if gathers := GATHERS.get(engine.optimizer):
        assert 0 < gathers.keep(1500) <= 1500
    return found + steps(engine, 3, first=2)


def not_finite(engine: Any) -> Numbers:
    """One micro-batch of rank 1 has an infinite gradient, and the step is skipped."""
    found = []
    for step in range(4):
        for micro in range(2):
            loss = engine(batch(engine, step, micro))
            engine.backward(loss * (float("inf") if (step, micro, dist.get_rank()) == (2, 0, 1) else 1.0))
            engine.step()
        found.append(torch.tensor(engine.skipped_steps))
    return found + whole(engine)


LIVES = {
    "steps": Life(steps),
    "bf16": Life(steps, dtype=torch.bfloat16),
    "one micro-batch": Life(steps, accumulation=1),
    "other layers": Life(other_layers),
    "evaluated": Life(evaluated),
    "two forwards": Life(two_forwards),
    "read between": Life(read_between),
    "changed": Life(changed),
    "caught": Life(caught),
    "boundaries": Life(without_sync, accumulation=1),
    "frozen": Life(frozen),
    "not finite": Life(not_finite),
    "reentrant": Life(recomputed_reentrantly),
    "recomputed": Life(recomputed),
    "kept": Life(kept),
}
ZERO = {
    "small messages": SMALL | {"stage3_prefetch_bucket_size": 100},
    "one message": SMALL | {"stage3_prefetch_bucket_size": 10**6},
    "little memory": SMALL | {"stage3_prefetch_bucket_size": 200, "stage3_max_live_parameters": 400},
    "reuse": SMALL | {"stage3_prefetch_bucket_size": 200, "stage3_max_reuse_distance": 500},
    "all stays": SMALL | {"stage3_max_reuse_distance": 10**9},
}
