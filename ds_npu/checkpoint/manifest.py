"""Records where each weight and its optimizer state are in the files of a checkpoint, whatever layout wrote them.

Each rank that writes one of DeepSpeed's files writes a manifest next to it: which elements of which weights are where.
``ds_npu.checkpoint.manifest_json`` reads manifests, ``ds_npu.checkpoint.written`` puts weights together by them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.topology.degrees import Axis

FILE = "ds_npu_layout_rank_{:05d}.json"
VERSION = 2
"""Since 2 a manifest has the dtypes of weights, and no run of values of a weight that was left out of the files."""
MODULE = "module"
"""The key of weights by name in DeepSpeed's files of models."""
JSON_KEYS = {"coordinates": "place"}
"""Keys of JSON that differ from the names of fields."""

Keys = tuple[str | int, ...]
"""The path of a tensor in a file of nested dicts and lists."""


@dataclass(frozen=True)
class WrittenRun:
    """Elements of one rank's part of a weight that follow each other in a tensor of a file; both are taken as flat."""

    file: str
    keys: Keys
    """The path of the tensor; for an optimizer's state, of the dict that has its tensors."""
    start: int
    """Index of the first element in the tensor."""
    first: int
    """Index of the first element in the part."""
    numel: int


@dataclass(frozen=True)
class WrittenPart:
    """The part of a weight or buffer that one rank has written."""

    shape: tuple[int, ...]
    """Shape of the rank's part."""
    shardings: Mapping[Axis, Sharding] = field(default_factory=dict)
    """Sharding along each axis, in the order in which the part was taken from the plain weight."""
    coordinates: Mapping[Axis, int] = field(default_factory=dict)
    """The rank along each of these axes."""
    value: WrittenRun | None = None
    """The values; None: they are in other ranks' files, or in none."""
    state: WrittenRun | None = None
    """The optimizer's state; None: it is in other ranks' files, or there is none."""
    group: int | None = None
    """Index of the settings of its parameter group."""
    dtype: str | None = None
    """Its dtype in the model; None in manifests of version 1."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """The shape of the weight in the plain model."""
        shape = list(self.shape)
        for sharding in reversed(list(self.shardings.values())):
            shape[sharding.dim] = sharding.size
        return tuple(shape)

    def like(self, other: WrittenPart) -> bool:
        """Whether both have the same elements at the same positions; experts may have moved between ranks."""
        is_same = (self.value, self.state) == (other.value, other.state)
        return is_same and self.is_part_like(other) and is_readable_as(self.dtype, other.dtype)

    def is_part_like(self, other: WrittenPart) -> bool:
        """Whether both are the same part of weights of the same shape."""
        return self._described() == other._described()

    def _described(self) -> object:
        sizes = {
            axis: (each.dim, [each.length(rank) for rank in range(len(each.ranges))])
            for axis, each in self.shardings.items()
        }
        return self.shape, sizes, self.shardings.get("tp"), dict(self.coordinates)


def is_readable_as(one: str | None, other: str | None) -> bool:
    """Whether numbers of one dtype can be copied to the other: floating-point numbers of any width, else the same."""
    return one is None or other is None or one == other or ("float" in one and "float" in other)


@dataclass(frozen=True)
class Manifest:
    """The content of one rank's files."""

    parts: Mapping[str, WrittenPart]
    """Parts of weights and buffers, by name in the plain model."""
    ranks: int
    """The number of ranks that wrote the checkpoint, also those that have no files of their own."""
    groups: Sequence[Mapping[str, Any]] = ()
    """The settings of the optimizer's parameter groups, as far as JSON has them."""
    model_file: str | None = None
    """The file with a run's counters, which the first data ranks write, or all."""
    layout: str = ""
    """The layout of the run that wrote it, in words for an error."""
    is_known: bool = True
    """Whether the positions of weights in the files are known; False: only the same layout reads them."""
    leaves_out_frozen: bool = False
    """Whether frozen weights were left out of the files."""
    version: int = VERSION
    files: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints, by name, of the files that the rank wrote in the same save; empty where they are not known."""

    def to_json(self) -> str:
        return json.dumps(
            dataclasses.asdict(
                self, dict_factory=lambda pairs: {JSON_KEYS.get(key, key): value for key, value in pairs}
            )
        )

    def like(self, other: Manifest) -> bool:
        """Whether both have the same elements at the same positions."""
        if (self.ranks, self.is_known) != (other.ranks, other.is_known):
            return False
        if not self.is_known and self.layout != other.layout:
            return False
        return self.parts.keys() == other.parts.keys() and all(
            part.like(other.parts[name]) for name, part in self.parts.items()
        )

    def has_parts_like(self, other: Manifest) -> bool:
        """Whether both ranks hold the same parts of the model."""
        return self.parts.keys() == other.parts.keys() and all(
            part.is_part_like(other.parts[name]) for name, part in self.parts.items()
        )


def manifest_path(folder: Path, rank: int) -> Path:
    """The path of the manifest of the global ``rank`` in the ``folder`` of a checkpoint."""
    return folder / FILE.format(rank)
