"""The result of a collective in flight, and the message between two autograd nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

T = TypeVar("T")


def identity(value: T) -> T:
    """The value itself."""
    return value


class Work(Protocol):
    """A collective in flight, as ``torch.distributed`` returns it, or several as one."""

    def wait(self) -> object: ...


class Works:
    """Several collectives in flight as one.

    A work that is None counts as ended, and so does no work at all.
    """

    def __init__(self, works: Sequence[Work | None] = ()) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            if work is not None:
                work.wait()


class Pending(Generic[T]):
    """A value that is complete once ``work`` (None: nothing to wait for) is done and ``finish`` has been applied to it.

    Until then nobody may read or write it.
    """

    def __init__(
        self, value: T, work: Work | None, finish: Callable[[T], T] = identity, sent: torch.Tensor | None = None
    ) -> None:
        """Keep ``sent``, which ``work`` reads, until ``work`` has been waited for.

        torch_npu would keep a tensor that is freed earlier until HCCL's stream has passed it, at a varying time; and a
        tensor that two messages read, only until the first of them has been waited for
        (WorkHCCL::synchronizeInternal, eraseStream).
        """
        self._value, self._finish = value, finish
        self._work, self._sent = work, sent

    def wait(self) -> T:
        """The finished value, the same object at every call; on an NPU the current stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = None
        self._value = self._finish(self._value)
        self._finish = identity
        return self._value


class InFlight(Generic[T]):
    """The one message between an autograd node that sends it and the node that waits for it, in either direction.

    A received message is not kept.
    """

    def __init__(self) -> None:
        self._pending: Pending[T] | None = None

    def post(self, pending: Pending[T]) -> None:
        self._pending = pending

    def wait(self) -> T:
        if self._pending is None:
            raise RuntimeError("nothing is in flight: wait was called before, and is to be called once")
        pending, self._pending = self._pending, None
        return pending.wait()
