"""Why a file could not be written, in words."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

UNTOUCHED = "What was saved there before is as it was. What to do: make room there, or save to another folder"
"""What an error about a checkpoint ends in."""


def why_not_written(error: Exception, path: Path, needed: int) -> str:
    """The reason in words; ``needed`` is the size in bytes of what was to be written to ``path``, as far as known."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    disk = next(folder for folder in (existing, *existing.absolute().parents) if folder.is_mount())
    free = shutil.disk_usage(disk).free
    said = f"{error}".strip().split("\n")[0]
    if "No space left on device" in said or needed > free:
        size = f"{needed:,} bytes are needed" if needed else "a few bytes are needed"
        return f"the disk {disk} is full: {size}, {free:,} are free"
    return f"{type(error).__name__}: {said}"


def tensor_bytes(state: Any) -> int:
    """The bytes of all tensors in nested dicts, lists and tuples; storages count once, and whole."""
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
