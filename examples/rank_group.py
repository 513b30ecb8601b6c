"""All ranks of one run: where this one is, agreeing on an error, and agreeing on when to stop."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist


class RunError(Exception):
    """Something the user must put right; the message says what, in plain words."""


def set_single_rank_environment() -> None:
    """Let the script run as plain ``python pretrain.py``: a world of one rank, unless a launcher has set up another."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(single, MASTER_PORT=str(port))


class Ranks:
    """This rank among all, and a gloo group of all for words between hosts.

    Host decisions (stop, an error, a checkpoint is whole) go through gloo on CPU, not through the device's own
    communicator: they neither wait for the device nor make it wait. Open it after the default process group.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.group = dist.new_group(backend="gloo") if self.size > 1 else None

    def gather(self, value: object) -> list[object]:
        """``value`` of every rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, error: Exception | None) -> None:
        """If any rank has an error, raise the first one on all of them. Every rank must call this at the same place."""
        texts = self.gather(None if error is None else str(error) or repr(error))
        failed = [rank for rank, text in enumerate(texts) if text is not None]
        if not failed:
            return
        where = "" if len(failed) == self.size else f" (on rank {', '.join(map(str, failed))} only)"
        raise RunError(f"{texts[failed[0]]}{where}")

    def agree_same(self, value: str, complaint: str) -> None:
        """Raise ``complaint`` on all ranks unless ``value`` is the same everywhere."""
        values = self.gather(value)
        if len(set(values)) > 1:
            raise RunError(f"{complaint}: {', '.join(f'rank {rank}: {text}' for rank, text in enumerate(values))}")

    def leave(self, message: str) -> NoReturn:
        """End this process with an error the other ranks do not share: they wait for it in a collective.

        Their launcher ends them. Rank 0 speaks first; another rank only if it is still there a little later, since an
        error like a full disk usually strikes all ranks, and one line is enough.
        """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.rank != 0:
            time.sleep(5)
        print(f"error: rank {self.rank}: {message}", file=sys.stderr, flush=True)
        os._exit(1)


class StopRequest:
    """Ctrl-C or SIGTERM on any rank, turned into one step after which all ranks stop together.

    A launcher may tell only one rank (DeepSpeed's tells rank 0 and waits for it), so the flag of every rank is reduced
    at each optimizer step. ``ask`` starts that reduction, one integer over gloo, before the step's last micro-batch;
    ``agreed`` reads it after the optimizer step. In between lies a whole forward and backward, so nobody waits for it,
    and the device is not involved at all. A signal that comes later in the step counts for the next one.

    The second Ctrl-C is left to the operating system, which ends the process at once. SIGTERM never counts as a
    second: DeepSpeed's launcher answers one Ctrl-C with a SIGTERM to its ranks, which had the Ctrl-C already.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None
        self.signal_name = ""

    def install(self) -> None:
        """Catch the signals from now on."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if not self.signal_name and self._ranks.local_rank == 0:
            # os.write, because print may have been interrupted half-way by this very signal.
            os.write(2, b"\nStopping after this step (a second Ctrl-C stops at once, without saving).\n")
        self.signal_name = self.signal_name or signal.Signals(number).name

    def ask(self) -> None:
        """Start the reduction for this optimizer step."""
        self._flag.fill_(1 if self.signal_name else 0)
        if self._ranks.size > 1:
            self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._ranks.group, async_op=True)

    def agreed(self) -> bool:
        """Whether all ranks stop after this step: the same answer on all of them."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return bool(self._flag.item())
