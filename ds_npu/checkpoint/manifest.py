"""Where in the files of a checkpoint each weight and the state of its optimizer are, whatever layout has written them.

Each rank that writes one of DeepSpeed's files writes a manifest beside it: which elements of which weights are where in
it. From the manifests of all ranks a weight is put together, one after the other (files are mapped, not read whole),
and a run on any other layout takes its own part.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from ds_npu.checkpoint.files import CheckpointError
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.topology.degrees import Axis

FILE = "ds_npu_layout_rank_{:05d}.json"
VERSION = 1
MODULE = "module"
"""The key of weights by name in DeepSpeed's files of models."""

Keys = tuple[str | int, ...]
"""The way to a tensor in a file of nested dicts and lists."""


@dataclass(frozen=True)
class WrittenRun:
    """Elements of one rank's part of a weight that follow each other in a tensor of a file; both are taken as flat."""

    file: str
    keys: Keys
    """Of the tensor; of the state of an optimizer, of the dict that has its tensors."""
    start: int
    """In the tensor."""
    first: int
    """In the part."""
    numel: int


@dataclass(frozen=True)
class WrittenPart:
    """What one rank has written of one weight or buffer."""

    shape: tuple[int, ...]
    """Of the rank's part."""
    shardings: Mapping[Axis, Sharding] = field(default_factory=dict)
    """By axis, in the order in which the part was taken from the plain weight."""
    place: Mapping[Axis, int] = field(default_factory=dict)
    """The rank along each of these axes."""
    value: WrittenRun | None = None
    """None: these elements are in other ranks' files."""
    state: WrittenRun | None = None
    """Of the optimizer; None: as well, or there is none."""
    group: int | None = None
    """Of the settings of its parameter group."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def like(self, other: WrittenPart) -> bool:
        """Whether the same elements are at the same places; experts may have moved between ranks."""
        return self._described() == other._described()

    def _described(self) -> object:
        sizes = {
            axis: (each.dim, [each.length(rank) for rank in range(len(each.ranges))])
            for axis, each in self.shardings.items()
        }
        exact = self.shardings.get("tp")
        return self.shape, sizes, exact, dict(self.place), self.value, self.state


@dataclass(frozen=True)
class Manifest:
    """What one rank has written."""

    parts: Mapping[str, WrittenPart]
    """By name in the plain model."""
    ranks: int
    """That wrote the checkpoint, also those that have no files of their own."""
    groups: Sequence[Mapping[str, Any]] = ()
    """The settings of the optimizer's parameter groups, as far as JSON has them."""
    model_file: str | None = None
    """The file with a run's counters, which the first data ranks write, or all."""

    def to_json(self) -> str:
        parts = {name: dataclasses.asdict(part) for name, part in self.parts.items()}
        own = {"ranks": self.ranks, "groups": list(self.groups), "model_file": self.model_file, "parts": parts}
        return json.dumps({"version": VERSION, **own})

    @staticmethod
    def from_json(text: str, path: Path) -> Manifest:
        """Raises CheckpointError for what another version has written."""
        found = json.loads(text)
        if found.get("version") != VERSION:
            raise CheckpointError(
                f"{path}: found version {found.get('version')}, and this ds_npu reads {VERSION}. What to do: load the "
                "checkpoint with the ds_npu that wrote it, and save_pretrained there"
            )
        parts = {name: _part_of_json(part) for name, part in found["parts"].items()}
        return Manifest(parts, found["ranks"], found["groups"], found["model_file"])

    def like(self, other: Manifest) -> bool:
        """Whether both have the same elements at the same places."""
        names = self.parts.keys()
        if self.ranks != other.ranks:
            return False
        return names == other.parts.keys() and all(self.parts[name].like(other.parts[name]) for name in names)


def manifest_path(folder: Path, rank: int) -> Path:
    """The file of the manifest of ``rank``, of all ranks, in the ``folder`` of a checkpoint."""
    return folder / FILE.format(rank)


def _part_of_json(found: dict[str, Any]) -> WrittenPart:
    return WrittenPart(
        tuple(found["shape"]),
        {axis: _sharding_of_json(each) for axis, each in found["shardings"].items()},
        found["place"],
        _run_of_json(found["value"]),
        _run_of_json(found["state"]),
        found["group"],
    )


def _run_of_json(found: dict[str, Any] | None) -> WrittenRun | None:
    return None if found is None else WrittenRun(**{**found, "keys": tuple(found["keys"])})


def _sharding_of_json(found: dict[str, Any]) -> Sharding:
    ranges = tuple(tuple((start, stop) for start, stop in each) for each in found["ranges"])
    return Sharding(found["dim"], found["size"], ranges)


class WrittenCheckpoint:
    """The weights and the optimizer's state of a checkpoint, each as a whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}

    @property
    def has_manifests(self) -> bool:
        """Whether manifests were written; the first rank always has one."""
        return manifest_path(self.folder, 0).exists()

    def manifest(self, rank: int) -> Manifest | None:
        """Of one rank; None where it wrote nothing."""
        path = manifest_path(self.folder, rank)
        return Manifest.from_json(path.read_text(), path) if path.exists() else None

    @cached_property
    def manifests(self) -> list[Manifest]:
        """Of all ranks that wrote the checkpoint; another one of the same name may have had more."""
        first = self.manifest(0)
        found = [first, *(self.manifest(rank) for rank in range(1, first.ranks if first else 0))]
        return [each for each in found if each is not None]

    def model_state(self) -> dict[str, Any]:
        """A copy of one of DeepSpeed's files of models: a run's counters and schedule; its weights are one rank's."""
        files = [each.model_file for each in self.manifests if each.model_file is not None]
        if not files:
            raise CheckpointError(
                f"{self.folder}: no manifest names a file of models. What to do: copy the whole folder"
            )
        return dict(self._file(files[0]))

    def of_optimizer(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """The state dict, under one of ``keys`` of a file, of an optimizer; empty where none was written."""
        for part in self._all_parts():
            if part.state is not None:
                file = self._file(part.state.file)
                return next((file[key] for key in keys if file.get(key)), {})
        return {}

    def has(self, name: str) -> bool:
        """Whether the weight or buffer ``name`` was written."""
        return any(part.value is not None or part.numel == 0 for part in self._parts.get(name, ()))

    def value(self, name: str) -> torch.Tensor:
        """The plain weight or buffer; raises CheckpointError where elements of it are in no file."""
        return self._whole(name, lambda part: part.value, self._at)

    def state(self, name: str) -> dict[str, Any]:
        """By key, the state that the optimizer has of a weight: tensors of its shape, and numbers.

        Raises CheckpointError for tensors of other shapes, of which nothing says what a part of the weight needs.
        """
        runs = [part.state for part in self._parts.get(name, ()) if part.state is not None]
        keys = dict.fromkeys(key for run in runs for key in self._at(run))
        found = {}
        for key in keys:
            first = self._at(runs[0])[key]
            if not isinstance(first, torch.Tensor) or first.dim() == 0:
                found[key] = first
                continue
            wrong = [run for run in runs if self._at(run)[key].numel() < run.start + run.numel]
            if wrong:
                raise CheckpointError(
                    f"{self.folder}: {key} of {name}, in the state of the optimizer, has the shape "
                    f"{list(first.shape)}, and not that of the weight: it does not load at another layout. What to do: "
                    "the layout that wrote it, or load_optimizer_states=False"
                )
            found[key] = self._whole(name, lambda part: part.state, partial(self._of_state, key=key))
        return found

    def settings(self, name: str) -> Mapping[str, Any]:
        """Of the parameter group of a weight; empty where it was not trained."""
        for manifest in self.manifests:
            part = manifest.parts.get(name)
            if part is not None and part.group is not None:
                return manifest.groups[part.group]
        return {}

    @cached_property
    def _parts(self) -> dict[str, list[WrittenPart]]:
        found: dict[str, list[WrittenPart]] = {}
        for manifest in self.manifests:
            for name, part in manifest.parts.items():
                found.setdefault(name, []).append(part)
        return found

    def _all_parts(self) -> Iterator[WrittenPart]:
        for manifest in self.manifests:
            yield from manifest.parts.values()

    def _file(self, name: str) -> Any:
        if name not in self._files:
            try:
                # As DeepSpeed reads them itself; they have its classes in them.
                self._files[name] = torch.load(self.folder / name, map_location="cpu", mmap=True, weights_only=False)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise CheckpointError(
                    f"{self.folder / name} cannot be read: {error}. What to do: copy the whole folder again, or an "
                    "earlier checkpoint"
                ) from error
        return self._files[name]

    def _at(self, run: WrittenRun) -> Any:
        found = self._file(run.file)
        for index, key in enumerate(run.keys):
            if isinstance(found, Mapping) and key not in found and index == len(run.keys) - 1:
                return {}  # The state of a weight that has not taken a step.
            found = found[key]
        return found

    def _of_state(self, run: WrittenRun, key: str) -> Any:
        return self._at(run)[key]

    def _whole(
        self, name: str, run_of: Callable[[WrittenPart], WrittenRun | None], tensor_of: Callable[[WrittenRun], Any]
    ) -> torch.Tensor:
        def part_at(place: dict[Axis, int]) -> torch.Tensor:
            here = [part for part in self._parts[name] if dict(part.place) == place]
            if not here:
                raise CheckpointError(f"{self.folder}: no file has the part of {name} at {place or 'any rank'}")
            runs = {run.first: run for part in here if (run := run_of(part)) is not None and run.numel}
            pieces, reached = [], 0
            while reached in runs:
                run = runs[reached]
                pieces.append(tensor_of(run).detach().reshape(-1)[run.start : run.start + run.numel])
                reached += run.numel
            if reached != here[0].numel:
                raise CheckpointError(
                    f"{self.folder}: {reached} of the {here[0].numel} elements of {name}"
                    f"{f' at {place}' if place else ''} are in its files. What to do: copy the whole folder"
                )
            flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else torch.empty(0)
            return flat.view(here[0].shape)

        def whole_at(axes: Sequence[Axis], place: dict[Axis, int]) -> torch.Tensor:
            if not axes:
                return part_at(place)
            sharding = shardings[axes[0]]
            return sharding.assemble(
                [whole_at(axes[1:], {**place, axes[0]: rank}) for rank in range(len(sharding.ranges))]
            )

        if name not in self._parts:
            raise CheckpointError(f"{self.folder}: {name} is in none of its files")
        shardings = self._parts[name][0].shardings
        return whole_at(list(shardings), {})
