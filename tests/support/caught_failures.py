"""Batches that fail on one rank of a pipeline, whose error a script catches, and the batches behind them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import gradient_rule
import pipeline_rule as rule
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_npu.parallel.pipeline.executor import PipelineError

DROPS = {"resid_pdrop": 0.2, "embd_pdrop": 0.2}
SEED = 5
Batch = dict[str, torch.Tensor]


def block_of(engine: Any) -> nn.Module:
    """A block of this rank's stages."""
    model = engine.module
    return next(block for block in model.transformer.h if any(True for _ in block.parameters()))


@contextmanager
def fails_on(rank: int, engine: Any, call: int, error: Exception, backward: bool = False):
    """A context in which the ``call``-th forward (or backward) of a block of ``rank`` raises ``error``."""
    calls = iter(range(100))

    def fail(*_: object) -> None:
        if next(calls) == call:
            raise error

    def on_the_way_back(module: object, args: object, out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        if hidden.requires_grad:
            hidden.register_hook(fail)

    hook = on_the_way_back if backward else fail
    handle = block_of(engine).register_forward_hook(hook) if dist.get_rank() == rank else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


class Run:
    """An accumulation of two batches of a script, in float64 or as the devices compute."""

    def __init__(self, section: dict, stage: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        model = rule.model_of("gpt2", dtype, **DROPS)
        self.engine = rule.engine_of(model, stage, dtype, section)
        topology = self.engine.topology
        steps = rule.batches(topology.size("dp"))
        self.batches = [{n: x.to(self.engine.device) for n, x in s[topology.rank("dp")].items()} for s in steps]
        torch.manual_seed(SEED)

    def forward(self, batch: Batch) -> torch.Tensor:
        return rule.loss_of(self.engine, batch, self.dtype)

    def step(self, between: Callable[[Run], None]) -> list[torch.Tensor]:
        """Losses of two batches, and all gradients; ``between`` is called before each of them."""
        found = []
        for index, batch in enumerate(self.batches):
            between(self)
            loss = self.forward(batch)
            found.append(loss.detach().clone())
            self.engine.backward(loss)
            if index == len(self.batches) - 1:
                gradients = gradient_rule.reduced_gradients(self.engine, self.engine.module)
                found += [gradients[name] for name in sorted(gradients)]
            self.engine.step()
        return found


def wrong_labels(batch: Batch, last: int = 10**6) -> Batch:
    labels = batch["labels"].clone()
    labels[1, 3] = last
    return batch | {"labels": labels}


def shorter(batch: Batch) -> Batch:
    """Of a shape that no rank has seen."""
    return {name: each[:, :6] for name, each in batch.items()}


def failing(run: Run, batch: Batch, said: str) -> None:
    """Every rank raises one error that names the cause."""
    with pytest.raises(PipelineError, match=said):
        run.forward(batch)
    assert not run.engine.pipeline.is_pending


def bad_batches(run: Run) -> None:
    """In the last stage by its labels, and by hooks in either rank's forwards and backwards, in training or not."""
    engine, batch = run.engine, run.batches[0]
    last = engine.pipeline.layout.last_rank
    failing(
        run, wrong_labels(batch), rf"ended on all ranks, since rank {last} failed in .*micro-batch 1\) by IndexError"
    )
    for rank in range(2):
        memory = torch.OutOfMemoryError(f"no memory on {rank}")
        said = rf"rank {rank} failed in \d+[FBIW]\d .* by .*(no memory on|given up on) {rank}"
        for given in (batch, shorter(batch)):
            with fails_on(rank, engine, 0, memory):
                failing(run, given, said)
        with fails_on(rank, engine, 1, memory):
            failing(run, batch, said)
        with fails_on(rank, engine, 1, ValueError(f"given up on {rank}"), backward=True):
            failing(run, batch, said)
        engine.eval()
        with torch.no_grad(), fails_on(rank, engine, 1, memory):
            failing(run, batch, said)
        engine.train()


def hold(
    section: dict, stage: int, dtype: torch.dtype = torch.float64, bad: Callable[[Run], None] = bad_batches
) -> None:
    """Losses and gradients are, to the bit, those of a run without the batches that fail."""
    expected = Run(section, stage, dtype).step(lambda _: None)
    found = Run(section, stage, dtype).step(bad)
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), (section, stage, index, (one - other).abs().max())
