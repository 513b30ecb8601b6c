"""One rank's files of a checkpoint as bytes in memory, and how surviving ranks write them, each by itself.

A rank's manifest is written after its files: the folder of a checkpoint is whole when it has the manifests of all
ranks. So ranks need not agree: the one that finishes last finds the folder whole, and lets ``latest`` name it.
"""

from __future__ import annotations

import fcntl
import io
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ds_npu.capability.named_classes import AllowedClass
from ds_npu.checkpoint.contents import fingerprint
from ds_npu.checkpoint.digests import DigestedWriter, FileDigests, digests_of, flush_folder
from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.manifest import manifest_path
from ds_npu.checkpoint.wholeness import UNFINISHED, name_in
from ds_npu.checkpoint.written import WrittenCheckpoint

Bytes = bytes | bytearray
LATEST = "latest"


@dataclass
class RankFiles:
    """The files that ``rank`` has in the checkpoint ``tag``, by name; its manifest is the last one."""

    tag: str
    step: int
    rank: int
    files: dict[str, Bytes] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the files into ``folder / tag``, the manifest last. Raises OSError.

        The rank itself and the rank that holds its copy may both do so: nothing is done where the manifest is there,
        and unfinished files have names of their own.
        """
        inside = folder / self.tag
        inside.mkdir(parents=True, exist_ok=True)
        if manifest_path(inside, self.rank).exists():
            return
        for name, data in self.files.items():
            _put(inside / name, data)
        flush_folder(inside)


def _put(path: Path, data: Bytes) -> None:
    """Write ``data`` to a file of another name, flush it, and rename it to ``path``. Raises OSError."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with DigestedWriter(unfinished) as writer:
            writer.write(data)
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise


def file_bytes(content: Any) -> tuple[bytes, FileDigests, str]:
    """``content`` as torch.save writes it, with the digests of its chunks and its fingerprint."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getvalue()
    return data, digests_of(data), fingerprint(io.BytesIO(data))


def is_whole(folder: Path, ranks: int) -> bool:
    """Whether the manifests of all ``ranks`` are in ``folder``."""
    return all(manifest_path(folder, rank).exists() for rank in range(ranks))


def name_latest(folder: Path, steps: Mapping[str, int], ranks: int, classes: Sequence[AllowedClass]) -> str | None:
    """Let ``latest`` in ``folder`` name the newest whole one of the tags of ``steps``; None where none is whole.

    ``classes``: those that files of checkpoints may hold. Where ``latest`` names a checkpoint that is not older, it is
    left so, and the tag of that one is returned. Raises OSError.
    """
    with _locked(folder):
        whole = [tag for tag in sorted(steps, key=steps.__getitem__) if is_whole(folder / tag, ranks)]
        if not whole:
            return None
        named = name_in(folder / LATEST)
        if named is not None and _step_of(folder / named, classes) >= steps[whole[-1]]:
            return named
        _put(folder / LATEST, whole[-1].encode())
        flush_folder(folder)
        return whole[-1]


def _step_of(folder: Path, classes: Sequence[AllowedClass]) -> int:
    """The optimizer steps before the checkpoint in ``folder`` was saved; -1 where that cannot be read."""
    written = WrittenCheckpoint(folder, classes)
    try:
        steps = written.model_state().get("global_steps", -1)
    except (CheckpointError, OSError):
        return -1
    finally:
        written.close()
    return steps if isinstance(steps, int) else -1


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time run the block, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
