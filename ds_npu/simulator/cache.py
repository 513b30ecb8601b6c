"""The folder of what has been compiled: who may write into it, whether a file is as it was written, who is at work."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import hashlib
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

SEAL = ".sha256"
"""Added to a file's name: the name of the file with its hash."""

ELSEWHERE = "name a folder of your own in DS_NPU_CACHE, as DS_NPU_CACHE=$HOME/.ds_npu"


class BuildError(Exception):
    """The simulator cannot be built here; the text says why and what to do."""


def cache_folder() -> Path:
    """Where builds are kept: DS_NPU_CACHE, or ``ds_npu`` in the user's cache folder. Raises BuildError without one."""
    named = os.environ.get("DS_NPU_CACHE")
    try:
        base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_npu"
        return (base / "simulator").resolve()
    except (RuntimeError, OSError) as error:
        raise BuildError(f"no folder to keep the simulated NPUs in: {error}; {ELSEWHERE}") from error


@contextmanager
def own_folder() -> Iterator[Path]:
    """``cache_folder``, made where there is none; what is made within is closed to others' writing.

    Raises BuildError where somebody else may write into it: Python would load what they put there.
    """
    folder = cache_folder()
    before = os.umask(0o077)
    os.umask(before | 0o022)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_others(folder)
        yield folder
    finally:
        os.umask(before)


def _refuse_others(folder: Path) -> None:
    """Raise BuildError where another user, who is not root, can change ``folder``, its parent or what lies above."""
    for place in (folder, *folder.parents):
        found = place.stat()
        is_ours = place in (folder, folder.parent)
        others = found.st_mode & stat.S_IWOTH and (is_ours or not found.st_mode & stat.S_ISVTX)
        group = is_ours and found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid)
        wrong = "everybody may write" if others else f"group {found.st_gid} may write" if group else ""
        if is_ours and not _trusts(found.st_uid):
            wrong = f"which belongs to user {found.st_uid}, and this is user {os.geteuid()}"
        if wrong:
            where = wrong if wrong.startswith("which") else f"into which {wrong}"
            close = "" if wrong.startswith("which") else f"chmod go-w {place}, or "
            raise BuildError(
                f"the simulated NPUs are kept under {place}, {where}; whoever does can run code as this user. "
                f"What to do: {close}{ELSEWHERE}"
            )


def _trusts(owner: int) -> bool:
    return owner in (0, os.geteuid())


def _is_private(group: int) -> bool:
    """Whether nobody else is in ``group``: root's, or the group of the user's own name that many systems make."""
    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group == 0 or (found.gr_name == user and set(found.gr_mem) <= {user})


def seal(file: Path) -> None:
    """Write down beside ``file`` what is in it now."""
    file.with_name(file.name + SEAL).write_text(hashlib.sha256(file.read_bytes()).hexdigest())


def is_sealed(file: Path) -> bool:
    """Whether ``file`` is what it was when it was sealed, and belongs to this user or root."""
    try:
        sealed = file.with_name(file.name + SEAL).read_bytes()
        return _trusts(file.stat().st_uid) and sealed == hashlib.sha256(file.read_bytes()).hexdigest().encode()
    except OSError:
        return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock at ``path``. It is the kernel's and goes with the process that holds it."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder in ``folder`` for one build, removed at its end; what killed builds have left is removed first.

    A build that lives holds the lock in its folder.
    """
    with locked(folder / "building.lock"):
        for left in folder.glob("building-*"):
            with contextlib.suppress(OSError), _taken(left):
                shutil.rmtree(left, ignore_errors=True)
        made = Path(tempfile.mkdtemp(dir=folder, prefix="building-"))
        lock = _taken(made)
    with lock:
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _taken(folder: Path) -> IO[str]:
    """The lock of a build's folder; raises OSError where somebody holds it."""
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock
