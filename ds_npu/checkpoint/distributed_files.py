"""Tensors in a folder that torch.distributed.checkpoint has written, as Megatron-Core does, read in one process.

torch's own reader loads the folder's ``.metadata`` with ``pickle``, which runs what is in it: here it is read with a
list of classes. Source: torch distributed/checkpoint/metadata.py and filesystem.py.
"""

from __future__ import annotations

import collections
import io
import math
import pathlib
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from ds_npu.checkpoint.contents import UNREADABLE, unreadable
from ds_npu.checkpoint.files import CheckpointError

METADATA = ".metadata"
CLASSES = (
    *(metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties),
    *(metadata.TensorStorageMetadata, metadata.ChunkStorageMetadata, metadata.BytesStorageMetadata),
    *(metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, planner.SavePlan, planner.WriteItem),
    *(planner.WriteItemType, planner.TensorWriteData, planner.BytesIOWriteData, torch.Size, collections.OrderedDict),
    *(torch.serialization._get_layout, pathlib.PosixPath, pathlib.PurePosixPath),
)
DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)
ALLOWED: Mapping[tuple[str, str], Any] = {
    **{(each.__module__, each.__qualname__): each for each in CLASSES},
    **{("torch", str(each).removeprefix("torch.")): each for each in DTYPES},
}

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""


class ForeignObject:
    """Stands for an object whose class is not loaded: it accepts every call of the unpickler, and does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> ForeignObject:
        return self

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        pass

    def extend(self, values: object) -> None:
        pass


class ListedUnpickler(pickle.Unpickler):
    """Loads a pickle with the classes, functions and dtypes of ``allowed``.

    An object of another class raises CheckpointError, or becomes a ForeignObject where ``lets_through``.
    """

    def __init__(self, path: Path, data: bytes, allowed: Mapping[tuple[str, str], Any], lets_through: bool) -> None:
        super().__init__(io.BytesIO(data))
        self._path, self._allowed, self._lets_through = path, allowed, lets_through

    def find_class(self, module: str, name: str) -> Any:
        found = self._allowed.get((module, name))
        if found is None and not self._lets_through:
            raise CheckpointError(
                f"{self._path} has an object of {module}.{name}, which is not loaded: a file can run code that way. "
                "What to do: save the weights again with an optimizer's state left out, or from another release"
            )
        return found or ForeignObject

    def persistent_load(self, key: Any) -> ForeignObject:
        return ForeignObject()


def listed_objects(path: Path, allowed: Mapping[tuple[str, str], Any]) -> Any:
    """Plain values and objects of ``allowed`` in a file that torch.save wrote; all else becomes ForeignObjects.

    Raises CheckpointError for a file that cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(each for each in archive.namelist() if each.endswith("/data.pkl"))
            return ListedUnpickler(path, archive.read(name), allowed, lets_through=True).load()
    except (OSError, StopIteration, pickle.UnpicklingError, *UNREADABLE) as error:
        raise unreadable(path, error) from error


@dataclass(frozen=True)
class _Storage:
    """Where the metadata says that the bytes of a chunk are; ``file`` is not checked yet."""

    file: object
    offset: int
    length: int
    transforms: object
    """Extensions that changed the bytes; None or empty where none did."""

    @staticmethod
    def of(stored: filesystem._StorageInfo) -> _Storage:
        return _Storage(stored.relative_path, stored.offset, stored.length, stored.transform_descriptors)


class DistributedFiles:
    """The tensors in ``folder``, by name. All methods raise CheckpointError for what cannot be read."""

    def __init__(self, folder: Path) -> None:
        path = folder / METADATA
        self._folder = folder
        try:
            found = ListedUnpickler(path, path.read_bytes(), ALLOWED, lets_through=False).load()
            self._tensors: dict[str, metadata.TensorStorageMetadata] = {
                name: each
                for name, each in found.state_dict_metadata.items()
                if isinstance(each, metadata.TensorStorageMetadata)
            }
            self.shapes = {str(name): tuple(map(int, each.size)) for name, each in self._tensors.items()}
            """Shapes of the whole tensors."""
            self._storage: dict[tuple[str, tuple[int, ...] | None], _Storage] = {
                (each.fqn, None if each.offset is None else tuple(each.offset)): _Storage.of(stored)
                for each, stored in found.storage_data.items()
            }
        except CheckpointError:
            raise
        except (OSError, pickle.UnpicklingError, *UNREADABLE) as error:
            raise unreadable(path, error) from error

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor ``name``, put together from its chunks."""
        known = self._tensors[name]
        shape = self.shapes[name]
        whole = torch.empty(shape, dtype=known.properties.dtype)
        boxes = [(tuple(map(int, each.offsets)), tuple(map(int, each.sizes))) for each in known.chunks]
        self._check(name, boxes)
        for offsets, sizes in boxes:
            view = whole
            for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
                view = view.narrow(dim, start, size)
            view.copy_(self._chunk(name, offsets, sizes))
        return whole

    def _check(self, name: str, boxes: Sequence[Box]) -> None:
        """Raise CheckpointError where the chunks do not hold each element of the tensor once."""
        shape = self.shapes[name]
        is_inside = all(
            len(offsets) == len(sizes) == len(shape)
            and all(start >= 0 and start + size <= end for start, size, end in zip(offsets, sizes, shape, strict=True))
            for offsets, sizes in boxes
        )
        is_apart = is_inside and not any(_overlap(*pair) for pair in _neighbours(boxes))
        held = sum(math.prod(sizes) for _, sizes in boxes)
        if not is_apart or held != math.prod(shape):
            raise CheckpointError(
                f"{self._folder / METADATA}: the chunks of {name} have {held:,} elements, and are not the "
                f"{math.prod(shape):,} of {list(shape)}, each once. What to do: copy the whole folder again"
            )

    def _chunk(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        stored = self._storage.get((name, offsets))
        file, transforms = (None, None) if stored is None else (stored.file, stored.transforms)
        if stored is None or not isinstance(file, str) or Path(file).name != file or transforms:
            what = "compressed by an extension of torch's" if transforms else f"in {file!r}, no file of this folder"
            raise CheckpointError(
                f"{self._folder / METADATA}: the chunk of {name} at {list(offsets)} is {what}. What to do: copy the "
                "whole folder again, or save it without extensions"
            )
        path = self._folder / file
        try:
            with path.open("rb") as opened:
                opened.seek(stored.offset)
                data = io.BytesIO(opened.read(stored.length))
            found = torch.load(data, map_location="cpu", weights_only=True)
        except (OSError, pickle.UnpicklingError, *UNREADABLE) as error:
            raise unreadable(path, error) from error
        if not isinstance(found, torch.Tensor) or found.numel() != math.prod(sizes):
            what = f"{list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise CheckpointError(
                f"{path}: {name} at {list(offsets)} is {what}, and {METADATA} says {list(sizes)}. What to do: copy the "
                "whole folder again"
            )
        return found.reshape(sizes)


def _neighbours(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs of chunks with an index of dim 0 in common."""
    ordered = sorted(boxes)
    for index, one in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if one[0] and other[0][0] >= one[0][0] + one[1][0]:
                break
            yield one, other


def _overlap(one: Box, other: Box) -> bool:
    return all(
        start < begin + width and begin < start + size for start, size, begin, width in zip(*one, *other, strict=True)
    )
