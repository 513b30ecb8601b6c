"""Facts about the batch of one forward of a model, kept outside of the modules.

Several forwards may run before the first backward, backward may run on another thread, and parts of a model may be
computed again in backward (activation checkpointing). A recomputed part finds the MicroBatch of its own forward

* in the enclosing call, on its own thread. The closure that a checkpoint calls again enters the MicroBatch of the
  forward (``closing_over_micro_batch``), for Hugging Face's layers, whose submodules alone are called again;
* else by the hidden states that enter a block or a region, by position or by name: ``torch.utils.checkpoint`` keeps
  its inputs and passes them again. With ``use_reentrant`` it detaches them; they keep their storage.

Autograd functions keep what they need themselves, in their contexts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class MicroBatch:
    """The Facts of one forward; it lives as long as the forward, the closures and the storages that refer to it."""

    def __init__(self, facts: Mapping[Fact[Any], Any]) -> None:
        self.facts = dict(facts)

    def carry_by(self, x: object) -> None:
        """Attach this MicroBatch to ``x``, if it is a tensor, and to its storage if ``x`` is all of that."""
        if isinstance(x, torch.Tensor):
            _MICRO_BATCH.set(x, self)
            with torch._C.DisableTorchFunctionSubclass():
                storage = x.untyped_storage()
                is_whole = x.untyped_storage().nbytes() == x.nbytes
            if is_whole:
                _MICRO_BATCH.set(storage, self)


class Fact(Generic[T]):
    """The key, in MicroBatches, of one kind of value.

    A fact that holds tensors of the graph is known only ``while_running``: the graph refers to the MicroBatch, and
    would otherwise keep itself alive.
    """

    def __init__(self, while_running: bool = False) -> None:
        self.while_running = while_running

    def of(self, micro_batch: MicroBatch | None) -> T | None:
        """The value that ``micro_batch`` knows; None where it knows none."""
        found: T | None = None if micro_batch is None else micro_batch.facts.get(self)
        return found

    def set(self, micro_batch: MicroBatch, value: T) -> None:
        micro_batch.facts[self] = value


_MICRO_BATCH: TensorAttribute[MicroBatch] = TensorAttribute("ds_npu_micro_batch")


SEQUENCE_LENGTH: Fact[int] = Fact()
"""The tokens of each sequence, in a pipeline stage behind the first: it may be sent shards of sequences."""
LEAVING_LENGTH: Fact[int] = Fact()
"""The tokens of each sequence, in a pipeline stage that sends shards of sequences to the next."""


class _Thread(threading.local):
    """The MicroBatch of the innermost call of a model, or of a part of one, on this thread."""

    micro_batch: MicroBatch | None = None
    graph_task = -1
    """The autograd task in which the call was made; -1 outside of a backward."""


_thread = _Thread()


def is_in_backward() -> bool:
    """Whether this thread runs a backward: a forward within it is a recomputation."""
    return torch._C._current_graph_task_id() >= 0


def running() -> MicroBatch | None:
    """The MicroBatch of the enclosing call on this thread; None in a backward that the call runs."""
    return _thread.micro_batch if _thread.graph_task == torch._C._current_graph_task_id() else None


def carried_by(x: object) -> MicroBatch | None:
    """The MicroBatch whose ``carry_by`` was last called with ``x``, or with a tensor of its storage."""
    if not isinstance(x, torch.Tensor):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return _MICRO_BATCH.get(x) or _MICRO_BATCH.get(x.untyped_storage())


@contextmanager
def within(micro_batch: MicroBatch | None) -> Iterator[MicroBatch]:
    """A context whose calls are part of ``micro_batch``; None: of a new one, which knows nothing."""
    entered = micro_batch or MicroBatch({})
    if entered is running():
        yield entered
        return
    before = _thread.micro_batch, _thread.graph_task
    _thread.micro_batch, _thread.graph_task = entered, torch._C._current_graph_task_id()
    try:
        yield entered
    finally:
        _thread.micro_batch, _thread.graph_task = before
        for fact in [each for each in entered.facts if each.while_running]:
            del entered.facts[fact]


@contextmanager
def new_forward() -> Iterator[MicroBatch]:
    """A context whose calls are part of a new MicroBatch, with the facts of the enclosing call."""
    around = running()
    with within(MicroBatch({} if around is None else around.facts)) as begun:
        yield begun


def closing_over_micro_batch(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` for a checkpoint that calls it now, in the running MicroBatch, and again in backward.

    Each call in backward is part of a copy of that MicroBatch as it is now.
    """
    micro_batch = running()
    if micro_batch is None:
        return function
    known = {fact: value for fact, value in micro_batch.facts.items() if not fact.while_running}

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with within(micro_batch if running() is micro_batch else MicroBatch(known)):
            return function(*args, **kwargs)

    return run
