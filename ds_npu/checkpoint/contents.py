"""DeepSpeed's files of a checkpoint, read without running anything in them, and the tensors that manifests name."""

from __future__ import annotations

import hashlib
import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.manifest import WrittenRun

REFUSED = re.compile(r"(?:GLOBAL|global|class) ([A-Za-z_][\w.]*\.\w+)")
"""How torch names a class that ``weights_only`` refuses."""


def fingerprint(path: Path) -> str:
    """A digest of the names, sizes and checksums of all records in a file that torch.save wrote.

    It tells one file of a checkpoint from another of the same name, without reading the tensors in it.

    torch writes zip archives, whose directory has a CRC-32 of each record. Raises OSError and zipfile.BadZipFile for
    what is no such archive, as a file that was cut short.
    """
    with zipfile.ZipFile(path) as archive:
        records = [(each.filename, each.file_size, each.CRC) for each in archive.infolist()]
    return hashlib.sha256(repr(records).encode()).hexdigest()


class CheckpointFiles:
    """The files in ``folder``, mapped and not read whole; each is opened once.

    ``classes``: classes that they may have in addition to tensors and plain Python values. All methods raise
    CheckpointError for files that cannot be read, or have no entry of the given name.
    """

    def __init__(self, folder: Path, classes: Sequence[Any]) -> None:
        self.folder, self._classes = folder, list(classes)
        self._read: dict[str, dict[str, Any]] = {}

    def named(self, name: str) -> dict[str, Any]:
        """The content of the file ``name``."""
        if name not in self._read:
            found = self._loaded(name)
            if not isinstance(found, dict):
                raise CheckpointError(
                    f"{self.folder / name} is none of DeepSpeed's files: expected a dict, found {type(found).__name__}"
                )
            self._read[name] = found
        return self._read[name]

    def fingerprint(self, name: str) -> str:
        """The fingerprint of the file ``name``."""
        path = self.folder / name
        try:
            return fingerprint(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise _unreadable(path, error) from error

    def _loaded(self, name: str) -> object:
        path = self.folder / name
        try:
            with torch.serialization.safe_globals(self._classes):
                # torch maps no files of DeepSpeed's checkpoint_serialization false.
                return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
        except pickle.UnpicklingError as error:
            refused = REFUSED.search(str(error))
            if refused is None:
                raise _unreadable(path, error) from error
            raise CheckpointError(
                f"{path} has an object of {refused[1]}, which is not loaded at another layout: a file can run code "
                "that way. What to do: if you trust the file, torch.serialization.add_safe_globals("
                f"[{refused[1].rpartition('.')[2]}]) before load_checkpoint; or leave the object out of client_state"
            ) from error
        except (OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise _unreadable(path, error) from error

    def at(self, run: WrittenRun, keys: Sequence[str | int]) -> Any:
        """Return the entry of the file of ``run`` at the path ``keys``."""
        found: Any = self.named(run.file)
        for key in keys:
            try:
                found = found[key]
            except (LookupError, TypeError) as error:
                raise CheckpointError(
                    f"{self.folder / run.file} has no {'/'.join(map(str, run.keys))}, which its manifest names. What "
                    "to do: copy the whole folder again, or load an earlier checkpoint"
                ) from error
        return found

    def tensor(self, run: WrittenRun) -> torch.Tensor:
        """The tensor that has the elements of ``run``."""
        found = self.at(run, run.keys)
        if not isinstance(found, torch.Tensor) or found.numel() < run.start + run.numel:
            what = f"{list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise CheckpointError(
                f"{self.folder / run.file}: {'/'.join(map(str, run.keys))} is {what}, and its manifest names the "
                f"elements from {run.start} to {run.start + run.numel} of it. What to do: copy the whole folder again"
            )
        return found

    def state(self, run: WrittenRun) -> Mapping[str, Any]:
        """The state of the optimizer; empty for a weight that has not taken a step."""
        states = self.at(run, run.keys[:-1])
        found = states.get(run.keys[-1], {}) if isinstance(states, Mapping) else None
        if not isinstance(found, Mapping):
            raise CheckpointError(
                f"{self.folder / run.file}: expected the state of an optimizer at {'/'.join(map(str, run.keys))}. What "
                "to do: copy the whole folder again"
            )
        return found


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {error}. What to do: copy the whole folder again, or an earlier checkpoint"
    )
