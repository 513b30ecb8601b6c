"""Checkpoints that are written on a thread while training goes on (``ds_npu.checkpoint.asynchronous``).

The call takes a snapshot in host memory; the thread writes DeepSpeed's files, agrees with the threads of all ranks, and
renames them, ``latest`` last. One save runs at a time: the next one, a load, and the end of the process wait for it.
"""

from __future__ import annotations

import atexit
import itertools
import sys
import threading
import time
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from ds_npu.checkpoint.files import UNTOUCHED
from ds_npu.engine.checkpoints.agreement import StoreAgreement
from ds_npu.engine.checkpoints.checkpoint_files import CheckpointTransaction
from ds_npu.engine.checkpoints.running_saves import RUNNING
from ds_npu.engine.failures.failed_ranks import is_of_transport
from ds_npu.engine.failures.termination import TERMINATION
from ds_npu.log import logger
from ds_npu.memory.host_snapshot import HostSnapshot

SIGNAL_WAIT_S, END_WAIT_S = 20.0, 300.0
"""How long a process that ends waits for the files of other ranks: after a SIGTERM or a rank's end, and otherwise."""
RANKS_GONE = (
    "What was saved there before is as it was. What to do: find the rank that ended first; start again with what "
    "latest names there, or with newer copies where a message of ds_npu.checkpoint.peer_copies names them"
)
"""The advice where a save has failed since ranks do not answer."""
ENGINES_COUNTED = itertools.count()
"""Numbers of engines, which are made in the same order on each rank."""


class BackgroundTransaction(CheckpointTransaction):
    """A transaction whose files are written by ``run``, on another thread, from a snapshot."""

    def __init__(
        self, plain: TorchCheckpointEngine, save_latest: bool, saves: BackgroundSaves, at_once: Set[int]
    ) -> None:
        super().__init__(plain, save_latest, saves.agreement())
        self.snapshot: HostSnapshot = saves.snapshot
        self._begin, self._at_once = saves.begin, at_once
        self._waiting: list[tuple[Any, str]] = []

    def save(self, state_dict: Any, path: str) -> None:
        self._waiting.append((self.snapshot.of(state_dict, self._at_once), path))

    def commit(self, info: Any) -> bool:
        self.snapshot.finish()
        self._begin(Path(info.save_dir, str(info.tag)), lambda: self._run(info))
        return True

    def _run(self, info: Any) -> None:
        try:
            self.snapshot.wait()
            while self._waiting:
                super().save(*self._waiting.pop(0))
            super().commit(info)
        finally:
            self._waiting.clear()
            self.remove_unfinished()


class BackgroundSaves:
    """The saves of one engine that run behind its training, one at a time."""

    folder: Path | None = None
    """The folder of the checkpoint that was begun last."""

    def __init__(self, device_type: str, timeout_s: float) -> None:
        self.snapshot = HostSnapshot(device_type)
        self._timeout_s, self._count, self._number = timeout_s, 0, next(ENGINES_COUNTED)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._agreement: StoreAgreement | None = None
        RUNNING.add(self)
        atexit.register(self._end)

    def agreement(self) -> StoreAgreement:
        """The agreement of the next save."""
        self._count += 1
        name = f"ds_npu checkpoint {self._number} {self._count}"
        self._agreement = StoreAgreement(dist.distributed_c10d._get_default_store(), name, self._timeout_s)
        return self._agreement

    def begin(self, folder: Path, write: Callable[[], None]) -> None:
        """Run ``write`` on a thread."""
        self.folder = folder.absolute()
        self._thread = threading.Thread(target=self._run, args=(folder, write), name=f"saving {folder}", daemon=True)
        TERMINATION.add(self._end_soon)
        self._thread.start()

    def forget_unbegun(self) -> None:
        """Drop the snapshot of a save that has failed before its thread began."""
        if self._thread is None:
            self.snapshot.release()

    def is_saved(self) -> bool:
        """Wait until the running save has ended; whether it is on the disk."""
        if self._thread is not None:
            self._thread.join()
        return self._error is None

    def before_step(self) -> None:
        """Let the device finish the snapshot before the optimizer step; raise the error of a save that has failed."""
        self.snapshot.hold_back()
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until the running save is on the disk; raise the RuntimeError that it has ended with, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            TERMINATION.remove(self._end_soon)
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(_told(error)) from error

    def _run(self, folder: Path, write: Callable[[], None]) -> None:
        begun = time.monotonic()
        try:
            write()
            if self._agreement is not None:
                self._agreement.leave()
            logger().info("%s is saved, %.1f s behind the call", folder, time.monotonic() - begun)
        except Exception as error:  # it is raised in the training loop
            self._error = error
        finally:
            self.snapshot.release()

    def _end_soon(self) -> None:
        self._end(is_hurried=True)

    def _end(self, is_hurried: bool = False) -> None:
        """Wait for the save at the end of the process, and log its error, which no call can raise any more."""
        if self._thread is not None:
            if self._agreement is not None:
                ended_by = getattr(sys, "last_value", None)
                is_hurried = is_hurried or (isinstance(ended_by, BaseException) and is_of_transport(ended_by))
                self._agreement.hurry(SIGNAL_WAIT_S if is_hurried else END_WAIT_S)
            self._thread.join()
        if self._error is not None:
            logger().error("%s", _told(self._error))
            self._error = None


def _told(error: Exception) -> str:
    advice = "" if UNTOUCHED in str(error) else f". {RANKS_GONE}"
    return f"a save behind training has failed: {error}{advice}"
