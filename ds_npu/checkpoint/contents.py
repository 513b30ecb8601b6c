"""DeepSpeed's files of a checkpoint, read without running anything in them, and the tensors that manifests name."""

from __future__ import annotations

import hashlib
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ds_npu.capability.named_classes import AllowedClass
from ds_npu.checkpoint.digests import DamagedFileError, FileDigests, VerifiedReader
from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.manifest import WrittenRun

REFUSED = re.compile(r"(?:GLOBAL|global|class) ([A-Za-z_][\w.]*\.\w+)")
"""Matches, in torch's error, the name of a class that ``weights_only`` refuses."""
UNREADABLE = (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile)
"""Errors that torch raises for a file that torch.save has not written."""
LARGEST_RECORDS = 3
"""The largest records of a file: the chunks at their ends are kept in memory. Adam's partition has three."""
Keys = tuple[str | int, ...]


def fingerprint(path: Path | IO[bytes]) -> str:
    """A digest of the names, sizes and checksums of all records in a file that torch.save wrote.

    It tells one file of a checkpoint from another of the same name, without reading the tensors in it.

    torch writes zip archives, whose directory has a CRC-32 of each record. Raises OSError and zipfile.BadZipFile for
    what is no such archive, as a file that was cut short.
    """
    with zipfile.ZipFile(path) as archive:
        records = [(each.filename, each.file_size, each.CRC) for each in archive.infolist()]
    return hashlib.sha256(repr(records).encode()).hexdigest()


def loaded(
    reader: VerifiedReader, classes: Sequence[AllowedClass], map_location: Any = "cpu", lazily: bool = False
) -> Any:
    """The content of a file that torch.save wrote; nothing in it is run.

    ``classes``: classes and functions that it may have in addition to tensors and plain Python values; ``lazily``:
    tensors have no values. Raises DamagedFileError, and CheckpointError for a file that cannot be read or has an
    object of another class.
    """
    path, file = reader.path, _as_file(reader)
    try:
        with torch.serialization.safe_globals(list(classes)), FakeTensorMode() if lazily else nullcontext():
            return torch.load(file, map_location=map_location, weights_only=True)
    except (pickle.UnpicklingError, *UNREADABLE) as error:
        if isinstance(reader.failure, DamagedFileError):
            raise reader.failure from error
        if reader.failure is not None:
            raise unreadable(path, reader.failure) from error
        refused = _refused(reader, classes, str(error)) if isinstance(error, pickle.UnpicklingError) else []
        if not refused:
            raise unreadable(path, error) from error
        names = ", ".join(refused)
        quoted = ", ".join(f'"{name}"' for name in refused)
        raise CheckpointError(
            f"{path} has an object of {names}, which is not loaded: a file can run code that way. What to do: if you "
            f"trust the file, ds_npu.checkpoint.allowed_classes: [{quoted}] in the config; or leave the object out of "
            "client_state"
        ) from error


def _as_file(reader: VerifiedReader) -> Any:
    """``reader`` without its type: torch wants IO[bytes], which has writing methods."""
    return reader


def _refused(reader: VerifiedReader, classes: Sequence[AllowedClass], message: str) -> list[str]:
    """The names of classes in the file that are not allowed; of archives all, else the first."""
    reader.seek(0)
    try:
        with torch.serialization.safe_globals(list(classes)):
            found = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(_as_file(reader)))
    except (pickle.UnpicklingError, *UNREADABLE):
        found = []
    named = REFUSED.search(message)
    return found or ([] if named is None else [named[1]])


class CheckpointFiles:
    """The files in ``folder``: each is opened once, and only values that are asked for are read.

    ``classes``: classes that they may have in addition to tensors and plain Python values; ``digests_of``: the digests
    of a file by its name, None where they are not known. All methods raise CheckpointError for files that cannot be
    read, or have no entry of the given name, and DamagedFileError.
    """

    def __init__(
        self,
        folder: Path,
        classes: Sequence[AllowedClass],
        digests_of: Callable[[str], FileDigests | None] = lambda name: None,
    ) -> None:
        self.folder, self._classes, self._digests_of = folder, list(classes), digests_of
        self._readers: dict[str, VerifiedReader] = {}
        self._read: dict[str, dict[str, Any]] = {}

    def close(self) -> None:
        """Close the files."""
        for each in self._readers.values():
            each.close()
        self._readers.clear()
        self._read.clear()

    @property
    def bytes_read(self) -> int:
        """Bytes that were read from all files."""
        return sum(each.bytes_read for each in self._readers.values())

    def named(self, name: str) -> dict[str, Any]:
        """The content of the file ``name``, whose tensors may have no values: ``elements`` reads them."""
        if name not in self._read:
            found = self._lazily_loaded(name)
            if not isinstance(found, dict):
                raise CheckpointError(
                    f"{self.folder / name} is none of DeepSpeed's files: expected a dict, found {type(found).__name__}"
                )
            self._read[name] = found
        return self._read[name]

    def whole(self, name: str, map_location: Any = "cpu") -> Any:
        """The content of the file ``name`` with all values."""
        with self._opened(name) as reader:
            return loaded(reader, self._classes, map_location)

    def fingerprint(self, name: str) -> str:
        """The fingerprint of the file ``name``."""
        path = self.folder / name
        try:
            return fingerprint(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise unreadable(path, error) from error

    def _opened(self, name: str) -> VerifiedReader:
        try:
            return VerifiedReader(self.folder / name, self._digests_of(name))
        except OSError as error:
            raise unreadable(self.folder / name, error) from error

    def _lazily_loaded(self, name: str) -> object:
        self._readers[name] = reader = self._opened(name)
        if reader.failure is not None:
            raise reader.failure
        records = _records(reader)
        if records is None:
            # Written with DeepSpeed's checkpoint_serialization false: torch keeps no positions of tensors then.
            reader.seek(0)
            return loaded(reader, self._classes)
        reader.headers = frozenset(records)
        found = loaded(reader, self._classes, lazily=True)
        positions = dict(records.values())
        reader.keep(_ends_of_largest(positions))
        for keys, tensor in tensors_in(found):
            begin = file_position(tensor)
            if begin is None:  # Earlier releases of torch keep no positions.
                reader.seek(0)
                return loaded(reader, self._classes)
            if positions.get(begin) != tensor.untyped_storage().nbytes():
                where = "/".join(map(str, keys))
                raise DamagedFileError(reader.path, None, f"the header of the record of {where} is damaged")
        return found

    def elements(self, file: str, tensor: torch.Tensor, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Read elements of ``tensor``, flattened, from ``file``, which holds it; only their bytes are read."""
        count = tensor.numel() - start if numel is None else numel
        begin = file_position(tensor)
        if begin is None or not isinstance(tensor, FakeTensor):
            return tensor.detach().reshape(-1)[start : start + count]
        if not tensor.is_contiguous():
            storage = torch.empty(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype)
            self._fill(file, begin, storage)
            strided = storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            return strided.reshape(-1)[start : start + count]
        found = torch.empty(count, dtype=tensor.dtype)
        self._fill(file, begin + (int(tensor.storage_offset()) + start) * tensor.itemsize, found)
        return found

    def _fill(self, file: str, begin: int, flat: torch.Tensor) -> None:
        if flat.numel() == 0:
            return
        buffer: Any = flat.view(torch.uint8).numpy()
        try:
            self._readers[file].read_at(begin, memoryview(buffer))
        except OSError as error:
            raise unreadable(self.folder / file, error) from error

    def with_values(self, file: str, content: Any) -> Any:
        """A copy of a part of the ``content`` of ``file``, whose tensors have their values."""
        if isinstance(content, torch.Tensor):
            return self.elements(file, content).view(content.shape)
        if isinstance(content, dict):
            made = {key: self.with_values(file, each) for key, each in content.items()}
            if type(content) is dict:
                return made
            copied = content.copy()
            copied.update(made)
            return copied
        if type(content) in (list, tuple):
            return type(content)(self.with_values(file, each) for each in content)
        return content

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
        """The tensor that has the elements of ``run``, maybe without its values."""
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


def _records(reader: VerifiedReader) -> dict[int, tuple[int, int]] | None:
    """Position and size of each record's data in an archive, by the position of its header; None for other files.

    torch aligns data to 64 bytes, with padding in the header (caffe2/serialize/inline_container.cc, getPadding), so
    that the directory alone tells where they are.
    """
    reader.seek(0)
    try:
        with zipfile.ZipFile(reader) as archive:
            infos = archive.infolist()
    except zipfile.BadZipFile:
        if isinstance(reader.failure, DamagedFileError):
            raise reader.failure from None
        return None
    except OSError as error:
        raise reader.failure or unreadable(reader.path, error) from error
    finally:
        reader.seek(0)
    return {each.header_offset: (_data_position(each), each.file_size) for each in infos}


def _ends_of_largest(positions: Mapping[int, int]) -> Iterator[int]:
    """Both ends of the largest records; ``positions``: the bytes of each record by the position of its first byte.

    The masters and both moments of a ZeRO partition are one record each, and are read in turns. A chunk with the end
    of one and the beginning of the next is needed twice, long after one another.
    """
    for begin in sorted(positions, key=lambda each: positions[each])[-LARGEST_RECORDS:]:
        yield from (begin, begin + positions[begin])


def _data_position(info: zipfile.ZipInfo) -> int:
    large = info.file_size >= ZIP64
    at = info.header_offset >= ZIP64
    start = info.header_offset + HEADER + len(info.filename.encode()) + 4 + 4 * (large or at) + 8 * large + 8 * at
    return -(-start // ALIGNMENT) * ALIGNMENT


ZIP64, HEADER, ALIGNMENT = 2**32 - 1, 30, 64


def file_position(tensor: torch.Tensor) -> int | None:
    """The first byte of a tensor's storage in its file; None for a tensor that has its values."""
    found: int | None = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    return found


def tensors_in(content: Any, keys: Keys = ()) -> Iterator[tuple[Keys, torch.Tensor]]:
    """The tensors with elements in nested dicts, lists and tuples, each with its path."""
    if isinstance(content, torch.Tensor):
        if content.numel():
            yield keys, content
    elif isinstance(content, Mapping):
        for key, each in content.items():
            yield from tensors_in(each, (*keys, key))
    elif isinstance(content, list | tuple):
        for index, each in enumerate(content):
            yield from tensors_in(each, (*keys, index))


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """The error of a file that cannot be read."""
    return CheckpointError(
        f"{path} cannot be read: {error}. What to do: copy the whole folder again, or an earlier checkpoint"
    )
