"""Files of checkpoints: the tensors in those of Hugging Face, mapped, and why a file could not be written."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

UNTOUCHED = "What was saved there before is as it was. What to do: make room there, or save to another folder"


class CheckpointError(ValueError):
    """A checkpoint is wrong, or does not fit the model it is meant for."""


def _safetensors(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, framework="pt", device="cpu") as opened:
        # A tensor of a mapped file takes no memory of its own; it keeps the mapping, not the handle.
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)


def _pickled(file: Path) -> dict[str, torch.Tensor]:
    loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise CheckpointError(f"{file} holds no state dict: expected names and tensors, found {type(loaded).__name__}")
    return loaded


READ_BY_SUFFIX = {".safetensors": _safetensors, ".bin": _pickled}
ENTRIES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files that hold a folder's weights or say where they are, the preferred first (as transformers does)."""


def open_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint in ``folder`` by its name there, on the CPU, in mapped files.

    The tensors must not be written to. Raises CheckpointError where there is no checkpoint, where a file of it is
    missing, or cannot be read as what its name says.
    """
    return {name: tensor for file in _weight_files(folder) for name, tensor in _read(file)}


def _weight_files(folder: Path) -> list[Path]:
    entry = next((folder / name for name in ENTRIES if (folder / name).is_file()), None)
    if entry is None:
        what = "found no such folder" if not folder.is_dir() else "found none of them"
        raise CheckpointError(f"{folder}: a checkpoint has one of {', '.join(ENTRIES)}; {what}")
    if entry.suffix != ".json":
        return [entry]
    try:
        names = sorted(set(json.loads(entry.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{entry} cannot be read as an index of weights: {error!r}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(names)} files that {entry.name} names: {', '.join(missing)}"
        )
    return [folder / name for name in names]


def _read(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if file.suffix not in READ_BY_SUFFIX:
        raise CheckpointError(f"{file}: weights are read from {' and '.join(READ_BY_SUFFIX)} files, not from this one")
    try:
        yield from READ_BY_SUFFIX[file.suffix](file).items()
    except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}. What to do: fetch the file anew (it may be cut short), or save the "
            "checkpoint again with save_pretrained"
        ) from error


def why_not_written(error: Exception, path: Path, needed: int) -> str:
    """Why writing ``needed`` bytes (0: not known) to ``path`` raised ``error``: a full disk, or another reason.

    Call it before other ranks remove what they have written: torch's errors do not say that a disk is full, so its
    free space is compared with ``needed``. The bytes of a file at ``path`` count as free.
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
    """The bytes of all tensors in nested dicts, lists and tuples; each storage counts once, with all its bytes."""
    found = {}
    for each in _tensors(state):
        storage = each.untyped_storage()
        found[storage.data_ptr() or id(each)] = storage.nbytes()
    return sum(found.values())


def host_memory(state: object) -> dict[int, int]:
    """The bytes of the storages of ``state`` that are on the host, by their address."""
    storages = [each.untyped_storage() for each in _tensors(state) if each.device.type == "cpu"]
    return {each.data_ptr(): each.nbytes() for each in storages}


def _tensors(state: object) -> Iterator[torch.Tensor]:
    left = [state]
    while left:
        each = left.pop()
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, list | tuple):
            left.extend(each)
