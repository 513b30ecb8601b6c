"""Tells in an error's words why a file could not be written."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

UNTOUCHED = "What was saved there before is as it was. What to do: make room there, or save to another folder"
"""The end of errors about a checkpoint."""


def why_not_written(error: Exception, path: Path, needed: int) -> str:
    """Why writing ``needed`` bytes (0: not known) to ``path`` raised ``error``: a full disk, or another reason.

    What other ranks have written must still be there: torch's errors do not say that a disk is full, so its free space
    has to. A file at ``path``, as far as it was written, counts as free.
    """
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    disk = next(folder for folder in (existing, *existing.absolute().parents) if folder.is_mount())
    free = shutil.disk_usage(disk).free + (path.stat().st_size if path.is_file() else 0)
    message = f"{error}".strip().split("\n")[0]
    if "No space left on device" in message or needed > free:
        size = f"{needed:,} bytes are needed" if needed else "a few bytes are needed"
        return f"the disk {disk} is full: {size}, {free:,} are free"
    return f"{type(error).__name__}: {message}"


def tensor_bytes(state: object) -> int:
    """The bytes of all tensors in nested dicts, lists and tuples; each storage counts once, and whole."""
    found: dict[int, int] = {}
    left = [state]
    while left:
        each = left.pop()
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            found[storage.data_ptr() or id(each)] = storage.nbytes()
        elif isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, list | tuple):
            left.extend(each)
    return sum(found.values())
