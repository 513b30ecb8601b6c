"""A record, in the store of the default process group, of the error that ended a rank first; all waits are bounded.

The store lives in rank 0's process (under torchrun in its agent). So rank 0 leaves last, or when its patience ends.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ds_npu.log import logger

T = TypeVar("T")

PATIENCE_SECONDS = 3.0
"""How long a rank waits to hear of another one's end, and rank 0 for all of them to have asked."""
LOOK_EVERY_SECONDS = 0.1
PREFIX = "ds_npu/failed"


@dataclass(frozen=True)
class Failure:
    """The error that ended a rank."""

    rank: int
    host: str
    kind: str
    """A text that is equal for errors that several ranks raise alike."""
    summary: str
    """Type and first line."""
    where: str
    """The innermost line of the user's script."""

    def told(self) -> str:
        """The failure in words, for another rank's last line."""
        return f"rank {self.rank}, which failed first, on {self.host}, and says why: {self.summary} (at {self.where})"


def rank_numbers() -> tuple[int, int, int]:
    """This process's rank, the number of ranks, and the rank on its node; 0, 1, 0 without a launcher."""
    if dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
    else:
        rank = _number("RANK", 0)
        ranks = _number("WORLD_SIZE", 1)
    return rank, ranks, _number("LOCAL_RANK", rank)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isascii() and text.isdecimal() else default


class FailureRecord:
    """The ranks' exchange about failures.

    No method waits without a bound, and none raises but those that say so.
    """

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self.store = PrefixStore(PREFIX, store)
        self.rank, self.ranks = rank, ranks

    @classmethod
    def of_this_world(cls) -> FailureRecord | None:
        """The record of the default process group; None where there is none, or one rank."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        return cls(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())

    def answers(self) -> bool:
        """Whether the store's process accepts connections; a call of a broken TCPStore would print errors."""
        store: Store = self.store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if not isinstance(store, TCPStore):
            return True
        with suppress(OSError), socket.create_connection((store.host, store.port), timeout=PATIENCE_SECONDS):
            return True
        return False

    def note(self, mine: Failure) -> Failure | None:
        """Note ``mine`` unless another rank was first; returns the first (None: the store does not answer)."""
        text = json.dumps(asdict(mine))
        return self.ask(lambda: _read(self.store.compare_set("first", "", text)), None)

    def first(self) -> Failure | None:
        """The failure that was noted first, if any."""
        return self.ask(lambda: _read(self.store.get("first")) if self.store.check(["first"]) else None, None)

    @property
    def timeout_s(self) -> float:
        """The timeout of the process group in seconds: torch gives it to its store."""
        store: Any = self.store
        return float(store.timeout.total_seconds())

    def tell_of_an_end(self) -> None:
        """Let ranks that wait know that a rank has ended which could not tell them itself."""
        self.ask(lambda: self.store.set("gone", "1"), None)

    def knows_an_end(self) -> bool:
        """Whether a rank has ended by an error; raises RuntimeError where the store is gone."""
        return any(self.store.check([key]) for key in ("left", "first", "gone"))

    def speaker_of(self, mine: Failure) -> int:
        """The rank that prints an error of this kind: rank 0 if it has it, too, else the first that asks."""

        def ask() -> int:
            key = f"rank 0 says {mine.kind}"
            if self.rank == 0:
                self.store.set(key, "1")
                return 0
            self._wait_for(key)
            return 0 if self.store.check([key]) else self._first_to_ask(mine.kind)

        return self.ask(ask, self.rank)

    def witness(self) -> int:
        """The rank that prints that another one is gone, where nobody knows why: the first that asks."""
        return self.ask(lambda: self._first_to_ask("gone"), self.rank)

    def _first_to_ask(self, what: str) -> int:
        return int(self.store.compare_set(f"speaker of {what}", "", str(self.rank)))

    def leave(self, *, after_rank_0: bool, waits: bool) -> None:
        """Let the others know that this rank has printed; rank 0 waits for them, since the store goes with it.

        A rank that has only pointed to another (``after_rank_0``) waits for rank 0: launchers end all with the first.
        Without ``waits`` this rank waits for none. Nothing is written to the screen meanwhile.
        """

        def others_are_told() -> None:
            if self.rank == 0:
                self.store.set("rank 0 has printed", "1")
            if self.store.add("left", 1) == self.ranks:
                self.store.set("all left", "1")
            if not waits:
                return
            if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                self._wait_for("all left")
            elif self.rank > 0 and after_rank_0:
                self._wait_for("rank 0 has printed")

        with _silent():
            self.ask(others_are_told, None)

    def _wait_for(self, key: str) -> None:
        # Not the store's own wait, which complains on the screen when the time is over.
        end = time.monotonic() + PATIENCE_SECONDS
        while not self.store.check([key]) and time.monotonic() < end:
            time.sleep(LOOK_EVERY_SECONDS)

    def ask(self, question: Callable[[], T], otherwise: T) -> T:
        """The answer of ``question``, or ``otherwise`` where there is none in time: a store may also just be silent."""
        answers: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError, OSError):
                answers.append(question())

        if not self.answers():
            return otherwise
        asking = threading.Thread(target=ask, name="ds_npu failure record", daemon=True)
        asking.start()
        asking.join(2 * PATIENCE_SECONDS)
        return answers[0] if answers else otherwise


@contextmanager
def _silent() -> Iterator[None]:
    """Let only ds_npu's log reach the screen: a store that goes meanwhile complains in C++, with a stack."""
    sys.stderr.flush()
    screen = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    handlers = [each for each in logger().handlers if isinstance(each, logging.StreamHandler)]
    before = [each.stream for each in handlers]
    try:
        with os.fdopen(os.dup(screen), "w") as kept:
            for each in handlers:
                each.setStream(kept)
            os.dup2(nowhere, 2)
            try:
                yield
            finally:
                for each, stream in zip(handlers, before, strict=True):
                    each.setStream(stream)
    finally:
        os.dup2(screen, 2)
        os.close(screen)
        os.close(nowhere)


def _read(text: bytes) -> Failure:
    return Failure(**json.loads(text))
