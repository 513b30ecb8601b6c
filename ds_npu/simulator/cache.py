"""The cache of compiled simulators: its owner, the hashes of its files, and the locks of builds."""

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
"""Suffix of the file that holds another file's SHA-256."""

ELSEWHERE = "name a folder of your own in DS_NPU_CACHE, as DS_NPU_CACHE=$HOME/.ds_npu"


class BuildError(Exception):
    """The simulator cannot be built here; the text says why and what to do."""


@contextmanager
def own_folder() -> Iterator[Path]:
    """The folder of builds, created if it is missing; files created in the context are not writable for other users.

    It is in DS_NPU_CACHE, or in ``ds_npu`` in the user's cache folder. Raises BuildError where there is neither, or
    another user may write into the folder: Python would load what they put there.
    """
    named = os.environ.get("DS_NPU_CACHE")
    try:
        base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_npu"
        folder = (base / "simulator").resolve()
    except (RuntimeError, OSError) as error:
        raise BuildError(f"no folder to keep the simulated NPUs in: {error}; {ELSEWHERE}") from error
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
    for path in (folder, *folder.parents):
        found = path.stat()
        is_ours = path in (folder, folder.parent)
        others = found.st_mode & stat.S_IWOTH and (is_ours or not found.st_mode & stat.S_ISVTX)
        group = is_ours and found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid)
        wrong = "everybody may write" if others else f"group {found.st_gid} may write" if group else ""
        if is_ours and not _trusts(found.st_uid):
            wrong = f"which belongs to user {found.st_uid}, and this is user {os.geteuid()}"
        if wrong:
            where = wrong if wrong.startswith("which") else f"into which {wrong}"
            close = "" if wrong.startswith("which") else f"chmod go-w {path}, or "
            raise BuildError(
                f"the simulated NPUs are kept under {path}, {where}; whoever does can run code as this user. "
                f"What to do: {close}{ELSEWHERE}"
            )


def _trusts(owner: int) -> bool:
    return owner in (0, os.geteuid())


def _is_private(group: int) -> bool:
    """Whether nobody else is in ``group``: root's, or the group of the user's own name that many systems make."""
    try:
        found = grp.getgrgid(group)
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group == 0 or (found.gr_name == user and set(found.gr_mem) <= {user})


def seal(file: Path) -> None:
    """Store the SHA-256 of ``file`` in a file next to it."""
    file.with_name(file.name + SEAL).write_text(hashlib.sha256(file.read_bytes()).hexdigest())


def is_sealed(file: Path) -> bool:
    """Whether ``file`` still has the hash that ``seal`` stored, and belongs to this user or root."""
    try:
        sealed = file.with_name(file.name + SEAL).read_bytes()
        return _trusts(file.stat().st_uid) and sealed == hashlib.sha256(file.read_bytes()).hexdigest().encode()
    except OSError:
        return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on the file ``path``; the kernel releases it when the process ends."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A temporary folder in ``folder`` for one build, removed at its end; those of killed builds are removed first.

    A running build holds the lock in its folder.
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
    """Take the lock of a build's folder; raises OSError where another build holds it."""
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock
