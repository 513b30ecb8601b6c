"""Paired passes: a forward of one micro-batch and a backward of another that overlap on one rank.

Each runs in a thread of its own, and only one runs at a time. A pass hands over where it would wait for a message next:
the other computes while its tokens travel. So the order of their launches depends on nothing but the points where they
hand over: it is the same on all ranks that run the same layers, and their collectives match. On an NPU both launch on
one stream, and neither host nor stream waits while the other pass can go on.

The graph of a micro-batch refers to its ``PairedPass``, by which a backward finds its pair on whatever thread autograd
runs it. A recomputation in a backward (activation checkpointing) does not hand over: the forward must not see the
random states that it has restored.
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


class PassKind(Enum):
    """One of the two passes of a pair; the forward begins."""

    FORWARD = "forward"
    BACKWARD = "backward"

    @property
    def other(self) -> PassKind:
        return PassKind.BACKWARD if self is PassKind.FORWARD else PassKind.FORWARD


class AbandonedError(RuntimeError):
    """Raised in a pass whose partner has failed."""


class _Pair:
    """Two passes in two threads, of which one runs at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._current = PassKind.FORWARD
        self._running = set(PassKind)
        self._has_failed = False
        self._to_its_end: PassKind | None = None
        """The pass that now runs to its end, without handing over."""

    def hand_over(self, own: PassKind, until_the_end: bool = False) -> None:
        """Let the other pass run until it hands over or ends. Raises AbandonedError where it has failed."""
        with self._changed:
            if own is self._to_its_end:
                return
            if until_the_end:
                self._to_its_end = own.other
            if own.other in self._running:
                self._current = own.other
                self._changed.notify_all()
            self._wait(own)

    def run(self, own: PassKind, compute: Callable[[], None]) -> None:
        """Run ``compute``, the pass ``own``, once the other has handed over to it."""
        try:
            with self._changed:
                self._wait(own)
            compute()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            with self._changed:
                self._running.discard(own)
                self._current = own.other
                self._changed.notify_all()

    def _wait(self, own: PassKind) -> None:
        self._changed.wait_for(lambda: self._current is own)
        if self._has_failed:
            raise AbandonedError("the computation that took turns with this one has failed")


class PairedPass:
    """The pass of one micro-batch in one stage: first its forward, later its backward; each may run in a pair."""

    def __init__(self) -> None:
        self._pair: _Pair | None = None
        self._own = PassKind.FORWARD

    def hand_over(self, own: PassKind) -> None:
        """Let the other pass run before this one waits; does nothing outside of a pair, or in a recomputation."""
        if self._pair is not None and own is self._own:
            self._pair.hand_over(own)

    def finish_backward(self) -> None:
        """Let the backward that is paired with this forward end, before this forward runs autograd."""
        if self._pair is not None and self._own is PassKind.FORWARD:
            self._pair.hand_over(PassKind.FORWARD, until_the_end=True)

    @contextmanager
    def within(self, pair: _Pair, own: PassKind) -> Iterator[None]:
        """A context in which this is the pass ``own`` of ``pair``."""
        self._pair, self._own = pair, own
        try:
            yield
        finally:
            self._pair = None


PAIRED_PASS: Fact[PairedPass] = Fact()


_UNPAIRED = PairedPass()


def running_pass() -> PairedPass:
    """The PairedPass of the running micro-batch; if it has none, a PairedPass that is never in a pair."""
    return PAIRED_PASS.of(running()) or _UNPAIRED


class PairRunner:
    """Runs pairs of a forward, on the calling thread, and a backward of another micro-batch, on its own thread.

    It is a context manager; the thread ends with the context.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(1, "ds_npu backward")

    def __enter__(self) -> PairRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def run(
        self, forward: Callable[[], None], backward: Callable[[], None], passes: tuple[PairedPass, PairedPass]
    ) -> None:
        """Run both; ``passes`` are the PairedPasses of the forward's and of the backward's micro-batch.

        Raises the error of the first pass that fails, when both have ended: the other ends where it would go on next.
        """
        pair = _Pair()
        settings = _ThreadSettings(self._device)
        with passes[0].within(pair, PassKind.FORWARD), passes[1].within(pair, PassKind.BACKWARD):
            compute = partial(settings.call, backward)
            behind = self._threads.submit(copy_context().run, pair.run, PassKind.BACKWARD, compute)
            try:
                pair.run(PassKind.FORWARD, forward)
            except BaseException as error:
                wait([behind])
                cause = behind.exception()
                if isinstance(error, AbandonedError) and cause is not None:
                    raise cause from None
                raise
            behind.result()


class _ThreadSettings:
    """Torch's settings of the thread that makes this: the current device and its stream, and autocast."""

    def __init__(self, device: torch.device) -> None:
        kinds = dict.fromkeys(("cpu", device.type))
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        if self._module is not None:
            self._index, self._stream = self._module.current_device(), self._module.current_stream()

    def call(self, function: Callable[[], None]) -> None:
        """Call ``function`` on another thread with these settings."""
        # The end of autocast's context manager would clear the casts of all threads.
        for kind, dtype, is_enabled in self._autocast:
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, is_enabled)
        if self._module is None:
            function()
            return
        self._module.set_device(self._index)
        with self._module.stream(self._stream):
            function()
