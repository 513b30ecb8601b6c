"""No file of DeepSpeed's shared-memory extension (deepspeed_shm_comm, CPU only) remains in /dev/shm.

Each rank makes a file of 69 MB, ``deepspeed_allreduce_buffer_<uid>_<MASTER_ADDR>_<MASTER_PORT>_<rank>``, maps those of
all ranks, keeps them open, and removes none of them, ever (DeepSpeed 0.19.8 ops/csrc/cpu/comm/shm.cpp). Once every
rank has mapped them nobody needs the names: without a name, the memory goes with the last process, whatever ends it.
"""

from __future__ import annotations

import fcntl
import functools
import os
import signal
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_npu.log import logger

FOLDER = Path("/dev/shm")
PREFIX = "deepspeed_allreduce_buffer"


def remove_names(original: Callable[..., None]) -> Callable[..., None]:
    """For the constructor that opens the shared memory (``TorchBackend.__init__``)."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.shm_comm_op is None:
            return
        # The extension returns on a rank that has mapped the files of all of them.
        dist.barrier()
        own = (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""), str(dist.get_rank()))
        with suppress(OSError):
            (FOLDER / "_".join([PREFIX, str(os.getuid()), *own])).unlink()
        if dist.get_rank() == 0:
            remove_abandoned()

    return init


def remove_abandoned() -> None:
    """Remove what killed runs of this user have left: files that no process of this machine has open or mapped."""
    removed = [path.name for path in sorted(FOLDER.glob(f"{PREFIX}_{os.getuid()}_*")) if _removed(path)]
    if removed:
        logger().info("removed from %s what a killed run has left: %s", FOLDER, ", ".join(removed))


def _removed(path: Path) -> bool:
    """Remove ``path`` if this user owns it and nobody uses it, in whichever container; whether it was removed.

    The kernel gives a write lease on a file that is open nowhere else, and on no other (fcntl(2), F_SETLEASE).
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
            return False
        # Whoever opens it meanwhile makes the kernel send us a signal: one that does nothing, not SIGIO, which kills.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        path.unlink()
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
