"""Batches of a ``deepspeed.PipelineModule`` with ``pipeline.schedule`` that fail on one rank, and those behind them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradient_rule as rule
import pytest
import torch
import torch.distributed as dist
from deepspeed import init_distributed
from ranks import run_on_ranks

from ds_npu.parallel.pipeline.executor import PipelineError

STAGES, MICRO_BATCHES = 3, 4
EXACT, SINGLE = 1e-12, 1e-6


class Raises(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("given up in backward")


def fail_in(engine: Any, rank: int, call: int, backward: bool = False) -> Any:
    """A hook by which the ``call``-th forward of ``rank`` raises, or its backward."""
    calls = iter(range(100))

    def hook(module: object, args: object, out: torch.Tensor) -> torch.Tensor:
        if next(calls) != call:
            return out
        if not backward:
            raise ValueError("given up in forward")
        return Raises.apply(out)

    last = list(engine.module.children())[-1]
    return last.register_forward_hook(hook) if dist.get_rank() == rank else None


def cut_short(batches: list[Any], rank: int, count: int, error: Exception) -> Iterator[Any]:
    """The batches, of which ``rank`` can read ``count``."""
    for index, batch in enumerate(batches):
        if index == count and dist.get_rank() == rank:
            raise error
        yield batch


def as_before(engine: Any) -> None:
    """Nothing of a batch that has failed is there."""
    timers = engine.timers.get_timers()
    assert not any(each.started_ or each.event_timers for each in timers.values())
    assert not engine.tput_timer.started
    assert all(each is None for loaded in engine.pipe_buffers.values() for each in loaded)
    assert all(weight.grad is None for weight in engine.module.parameters())
    assert engine.global_steps == 0 and not engine.scheduled.held.is_held


def failures(engine: Any, batches: list[Any]) -> None:
    """Each ends in one error on all ranks."""
    for rank in range(STAGES):
        for call, backward in ((0, False), (2, False), (1, True)):
            handle = fail_in(engine, rank, call, backward)
            said = rf"since rank {rank} failed in {rank}[FBI]{call} .* by ValueError: given up in"
            with pytest.raises(PipelineError, match=said):
                engine.train_batch(iter(batches))
            as_before(engine)
            if handle is not None:
                handle.remove()
    for rank in (0, STAGES - 1):
        for count in (0, 2):
            read = cut_short(batches, rank, count, OSError("no such shard"))
            said = rf"since rank {rank} failed in loading \(stage {rank}, micro-batch {count}\) by OSError: no such"
            with pytest.raises(PipelineError, match=said):
                engine.train_batch(read)
            as_before(engine)
    with pytest.raises(PipelineError, match=r"since rank 0 failed in loading .* by StopIteration"):
        engine.train_batch(iter(batches[:1] if dist.get_rank() == 0 else batches))
    as_before(engine)
    with pytest.raises(StopIteration):
        engine.train_batch(iter(batches[:3]))
    as_before(engine)
    with engine.no_sync(), pytest.raises(RuntimeError, match=r"inside of engine\.no_sync"):
        engine.train_batch(iter(batches))
    as_before(engine)


def engine_of(schedule: str, stage: int) -> tuple[Any, list[Any]]:
    """An engine of one stage a rank, and its batches."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    rule.without_extension()
    init_distributed("gloo")
    rule.ACCUMULATION = MICRO_BATCHES
    config = rule.config(stage, torch.float64, {"pipeline": STAGES}) | {"gradient_accumulation_steps": MICRO_BATCHES}
    config["ds_npu"]["pipeline"] = {"schedule": schedule}
    module = PipelineModule(rule.layers(), num_stages=STAGES, loss_fn=rule.token_loss, partition_method="uniform")
    engine = deepspeed.initialize(model=module.double(), model_parameters=module.parameters(), config=config)[0]
    return engine, rule.my_batches(engine.topology)


def hold(schedule: str, stage: int) -> None:
    """A step behind all of them is that of one process."""
    engine, batches = engine_of(schedule, stage)
    failures(engine, batches)
    loss = float(engine.train_batch(iter(batches)))
    expected = rule.reference(rule.MICRO * MICRO_BATCHES, torch.nn.Sequential(*rule.layers()))
    found = {name: weight.detach().double() for name, weight in engine.module.named_parameters()}
    error = rule.relative(found, {name: expected.weights[name] for name in found})
    norm_error = abs(float(engine.get_global_grad_norm()) / expected.norm - 1)
    tight = EXACT if stage == 0 else SINGLE
    assert error <= tight and norm_error <= tight, (schedule, error, norm_error)
    assert abs(loss / expected.loss - 1) <= SINGLE, (schedule, loss, expected.loss)


def test_every_failure():
    run_on_ranks(STAGES, hold, "1f1b", 0)


@pytest.mark.slow
def test_every_failure_where_weight_gradients_come_later():
    run_on_ranks(STAGES, hold, "zb_h1", 1)
