"""Two computations of one rank that take turns: while the messages of one travel, the other computes.

They are a forward of one micro-batch and a backward of another, each in a thread of its own, and only one runs at a
time. It hands over where it would wait for a message next. So what both launch has one order, which depends on nothing
but the places where they hand over: it is the same on all ranks that run the same layers, and collectives over them
meet. On an NPU both launch on one stream, and neither host nor stream waits while the other has something to do.

The graph of a micro-batch refers to its ``Turns``, by which a backward finds its turn on whatever thread autograd runs
it. What a backward computes again (activation checkpointing) it computes in one turn: random states that it has
restored are not seen by the forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from enum import Enum
from functools import partial

import torch

from ds_npu.parallel.runtime.micro_batch import Fact, running


class Turn(Enum):
    """Which of the two; the forward begins."""

    FORWARD = "forward"
    BACKWARD = "backward"

    @property
    def other(self) -> Turn:
        return Turn.BACKWARD if self is Turn.FORWARD else Turn.FORWARD


class AbandonedError(RuntimeError):
    """In a computation whose other has failed."""


class _Pair:
    """Whose turn it is."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn = Turn.FORWARD
        self._running = set(Turn)
        self._has_failed = False
        self._to_its_end: Turn | None = None
        """Which hands over no more."""

    def hand_over(self, turn: Turn, until_the_end: bool = False) -> None:
        """Let the other run; returns when it hands over or has ended. Raises AbandonedError where it has failed."""
        with self._changed:
            if turn is self._to_its_end:
                return
            if until_the_end:
                self._to_its_end = turn.other
            if turn.other in self._running:
                self._turn = turn.other
                self._changed.notify_all()
            self._wait(turn)

    def run(self, turn: Turn, compute: Callable[[], None]) -> None:
        """Run ``compute`` when it is the turn of ``turn``."""
        try:
            with self._changed:
                self._wait(turn)
            compute()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            with self._changed:
                self._running.discard(turn)
                self._turn = turn.other
                self._changed.notify_all()

    def _wait(self, turn: Turn) -> None:
        self._changed.wait_for(lambda: self._turn is turn)
        if self._has_failed:
            raise AbandonedError("the computation that took turns with this one has failed")


class Turns:
    """The turns of one micro-batch in one stage: of its forward, and later of its backward, where another runs too."""

    def __init__(self) -> None:
        self._pair: _Pair | None = None
        self._own = Turn.FORWARD

    def hand_over(self, turn: Turn) -> None:
        """Let the other run before this waits; returns at once where none does, or for what a backward recomputes."""
        if self._pair is not None and turn is self._own:
            self._pair.hand_over(turn)

    def finish_backward(self) -> None:
        """In a forward: let a backward that runs beside it come to its end."""
        if self._pair is not None and self._own is Turn.FORWARD:
            self._pair.hand_over(Turn.FORWARD, until_the_end=True)

    @contextmanager
    def taken(self, pair: _Pair, turn: Turn) -> Iterator[None]:
        """A context in which the micro-batch is ``turn`` of ``pair``."""
        self._pair, self._own = pair, turn
        try:
            yield
        finally:
            self._pair = None


TURNS: Fact[Turns] = Fact()


def hand_over(turns: Turns | None, turn: Turn) -> None:
    """``turns.hand_over``; nothing where there are none."""
    if turns is not None:
        turns.hand_over(turn)


def finish_backward() -> None:
    """Before a forward runs autograd itself, whose one thread of an NPU may be where a backward waits for its turn."""
    turns = turns_of_running()
    if turns is not None:
        turns.finish_backward()


def turns_of_running() -> Turns | None:
    """Those of the micro-batch that runs."""
    return TURNS.of(running())


class Together:
    """Runs a forward on the thread that calls, and a backward of another micro-batch on one of its own, by turns.

    A context: its thread ends with it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(1, "ds_npu backward")

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def run(self, forward: Callable[[], None], backward: Callable[[], None], turns: tuple[Turns, Turns]) -> None:
        """``turns``: of the forward's and of the backward's micro-batch.

        Raises what the first of both to fail has raised, when both have ended: the other ends where its next turn would
        begin.
        """
        pair, settings = _Pair(), _ThreadSettings(self._device)
        with turns[0].taken(pair, Turn.FORWARD), turns[1].taken(pair, Turn.BACKWARD):
            compute = partial(settings.call, backward)
            behind = self._threads.submit(copy_context().run, pair.run, Turn.BACKWARD, compute)
            try:
                pair.run(Turn.FORWARD, forward)
            except BaseException as error:
                wait([behind])
                cause = behind.exception()
                if isinstance(error, AbandonedError) and cause is not None:
                    raise cause from None
                raise
            behind.result()


class _ThreadSettings:
    """What torch knows of the thread that makes it: the current device and its stream, and autocast."""

    def __init__(self, device: torch.device) -> None:
        kinds = dict.fromkeys(("cpu", device.type))
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        if self._module is not None:
            self._index, self._stream = self._module.current_device(), self._module.current_stream()

    def call(self, function: Callable[[], None]) -> None:
        """``function()`` on another thread, as it would run on this one."""
        # Not by autocast's context manager, whose end would clear the casts of all threads.
        for kind, dtype, is_enabled in self._autocast:
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, is_enabled)
        if self._module is None:
            function()
            return
        self._module.set_device(self._index)
        with self._module.stream(self._stream):
            function()
