"""The weights and the optimizer's state of a checkpoint, put together from the files of all ranks by manifests.

Its weights are compared with those of a run's model, too: names, shapes and dtypes of plain weights, no values.

One weight is put together after the other; files are mapped, not read whole. Nothing in a file is run when it is
loaded: it is read with ``weights_only``, and the classes that it may have are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.folder import CheckpointFolder
from ds_npu.checkpoint.manifest import MODULE, WrittenPart, WrittenRun, is_readable_as
from ds_npu.checkpoint.selection import Block, Selection, selected
from ds_npu.config.whole_matrices import BY_ELEMENT, MUON

PARTITIONED, MOMENTUM = "base_optimizer_state", "momentum_buffer"
"""Keys of the state dict of ZeRO 1 and 2, and of Muon's state."""
LARGE = (MODULE, "optimizer")
"""Keys of a file of models under which weights and their states are, which are read one by one, by name."""
LISTED = 6
"""How many names of a kind an error lists; the others are counted."""
RunOf = Callable[[WrittenPart], WrittenRun | None]
"""Picks a part's run of values, or of the optimizer's state."""
TensorOf = Callable[[WrittenRun], Any]


class Plain(NamedTuple):
    """Shape and dtype of a weight or buffer in the plain model."""

    shape: tuple[int, ...]
    dtype: str | None


@dataclass(frozen=True)
class Differences:
    """The names at which a checkpoint and a model do not fit."""

    missing: Sequence[str] = ()
    """Names in the model only."""
    unexpected: Sequence[str] = ()
    """Names in the checkpoint only."""
    other: Sequence[str] = ()
    """Sentences about weights of another shape, or whose dtype cannot be converted."""

    @property
    def any_names(self) -> bool:
        return bool(self.missing or self.unexpected)

    def told(self) -> str:
        kinds = (
            ("missing from the checkpoint", self.missing),
            ("in the checkpoint only", self.unexpected),
            ("of another shape or dtype", self.other),
        )
        return "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds if names)


def differences(written: Mapping[str, Plain], wanted: Mapping[str, Plain]) -> Differences:
    """Compare the weights of a checkpoint with those that one rank holds."""
    missing = [name for name in wanted if name not in written]
    unexpected = [name for name in written if name not in wanted]
    other = []
    for name, mine in wanted.items():
        theirs = written.get(name)
        if theirs is None:
            continue
        if theirs.shape != mine.shape:
            other.append(f"{name} is {list(theirs.shape)} in the checkpoint and {list(mine.shape)} in the model")
        elif not is_readable_as(theirs.dtype, mine.dtype):
            other.append(f"{name} is {theirs.dtype} in the checkpoint and {mine.dtype} in the model")
    return Differences(missing, unexpected, other)


def over_ranks(found: Sequence[Differences]) -> Differences:
    """Join the differences that each rank found with its own weights: a name that no rank has is unexpected."""
    held = [set(each.unexpected) for each in found]
    return Differences(
        list(dict.fromkeys(name for each in found for name in each.missing)),
        [name for name in found[0].unexpected if all(name in each for each in held)] if found else (),
        list(dict.fromkeys(line for each in found for line in each.other)),
    )


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


class WrittenCheckpoint(CheckpointFolder):
    """The weights and the optimizer's state of the checkpoint in ``folder``, each as a whole.

    ``classes``: classes that its files may have in addition to tensors and plain Python values.
    """

    def plain_weights(self) -> dict[str, Plain]:
        """Shape and dtype of each weight and buffer whose values were written, or may have been, by name."""
        return {
            name: Plain(parts[0].plain_shape, parts[0].dtype)
            for name, parts in self._parts.items()
            if not self.is_known or self.has(name)
        }

    def model_state(self) -> dict[str, Any]:
        """The run's counters and schedule, from one of DeepSpeed's files of models, without weights and states."""
        files = [each.model_file for each in self.manifests if each.model_file is not None]
        if not files:
            raise CheckpointError(
                f"{self.folder}: no manifest names a file of models. What to do: copy the whole folder"
            )
        with self.damage_named():
            content = self._files.named(files[0])
            return {key: self._files.with_values(files[0], each) for key, each in content.items() if key not in LARGE}

    def of_optimizer(self, keys: Sequence[str], names: Sequence[str]) -> Mapping[str, Any]:
        """The entries ``names`` of the optimizer's state dict, which a file has under one of ``keys``.

        Those that are not there are left out; empty where no state was written.
        """
        for part in (part for manifest in self.manifests for part in manifest.parts.values()):
            if part.state is not None:
                name = part.state.file
                with self.damage_named():
                    file = self._files.named(name)
                    found: Mapping[str, Any] = next((file[key] for key in keys if isinstance(file.get(key), dict)), {})
                    return {each: self._files.with_values(name, found[each]) for each in names if each in found}
        return {}

    def has(self, name: str) -> bool:
        """Whether the values of the weight or buffer ``name`` were written."""
        return any(part.numel == 0 or (part.value is not None and self._is_there(part)) for part in self._parts[name])

    def value(self, name: str, wanted: Selection | None = None, is_narrow: bool = False) -> torch.Tensor:
        """The plain weight or buffer, or what is ``wanted`` of it, flat: nothing else is read.

        ``is_narrow``: as written in 16 bits. Raises CheckpointError where elements of it are in no file.
        """
        with self.damage_named():
            run_of: RunOf = attrgetter("narrow" if is_narrow else "value")
            return self._read(name, run_of, self._files.tensor, wanted)

    def has_narrow(self, name: str, dtype: torch.dtype) -> bool:
        """Whether all values of the weight ``name`` were written in ``dtype``, of 16 bits, as well as in float32."""
        parts = self._parts[name]
        found = {tuple(part.coordinates.items()) for part in parts if part.narrow is not None}
        has_all = all(tuple(part.coordinates.items()) in found for part in parts if part.numel)
        return has_all and parts[0].dtype == str(dtype)

    def state(self, name: str, wanted: Selection | None = None) -> dict[str, Any]:
        """The optimizer's state of a weight, by key: tensors of its shape, or what is ``wanted``, flat; and numbers.

        Raises CheckpointError for tensors of other shapes: nothing tells what a part of the weight needs of them.
        """
        with self.damage_named():
            return self._state(name, wanted)

    def _state(self, name: str, wanted: Selection | None) -> dict[str, Any]:
        runs = self._runs(name, lambda part: part.state, wanted)
        states = {run: self._files.state(run) for run in runs}
        settings = self.settings(name)
        keys = {key for run in runs for key in (*run.keys, *states[run])}
        if settings.get(MUON) and not settings.get(BY_ELEMENT) and {PARTITIONED, MOMENTUM} <= keys:
            raise CheckpointError(
                f"{self.folder}: the momentum of {name} was written by DeepSpeed's own Muon, which keeps more of it "
                "than a rank's partition, in no known place. What to do: load it at the layout that wrote it and save "
                "it again; or load_optimizer_states=False"
            )
        found: dict[str, Any] = {}
        for key in dict.fromkeys(key for each in states.values() for key in each):
            missing = [run for run in runs if key not in states[run]]
            if missing:
                raise CheckpointError(
                    f"{self.folder / missing[0].file} has no {key} of {name} in the state of the optimizer, which "
                    "another file has. What to do: copy the whole folder again"
                )
            first = states[runs[0]][key]
            if not isinstance(first, torch.Tensor) or first.dim() == 0:
                found[key] = self._files.with_values(runs[0].file, first)
                continue
            tensors = {run: states[run][key] for run in runs}
            if any(not _has_all(tensor, run) for run, tensor in tensors.items()):
                raise CheckpointError(
                    f"{self.folder}: {key} of {name}, in the state of the optimizer, has the shape "
                    f"{list(first.shape)}, and not that of the weight: it does not load at another layout. What to do: "
                    "the layout that wrote it, or load_optimizer_states=False"
                )
            found[key] = self._read(name, lambda part: part.state, tensors.__getitem__, wanted)
        return found

    def settings(self, name: str) -> Mapping[str, Any]:
        """Settings of a weight's parameter group; empty where it was not trained."""
        return self.group(name)[1]

    def group(self, name: str) -> tuple[int | None, Mapping[str, Any]]:
        """The index and the settings of a weight's parameter group; None and nothing where it was not trained."""
        for manifest in self.manifests:
            part = manifest.parts.get(name)
            if part is not None and part.group is not None:
                return part.group, manifest.groups[part.group]
        return None, {}

    @cached_property
    def _parts(self) -> dict[str, list[WrittenPart]]:
        found: dict[str, list[WrittenPart]] = {}
        for manifest in self.manifests:
            for name, part in manifest.parts.items():
                others = found.setdefault(name, [])
                if others and (others[0].plain_shape, others[0].shardings) != (part.plain_shape, part.shardings):
                    raise CheckpointError(
                        f"{self.folder}: the manifests of two ranks differ in how {name} is sharded. What to do: copy "
                        "the whole folder again"
                    )
                others.append(part)
        return found

    def _is_there(self, part: WrittenPart) -> bool:
        """Whether the file has what its manifest names; version 1 also names frozen weights that were left out."""
        run = part.value
        if run is None or self.manifests[0].version > 1 or len(run.keys) != 2:
            return run is not None
        with self.damage_named():
            held = self._files.named(run.file).get(str(run.keys[0]))
        return isinstance(held, Mapping) and run.keys[1] in held

    def _runs(self, name: str, run_of: RunOf, wanted: Selection | None) -> list[WrittenRun]:
        """The runs that hold elements of a weight, or of what is ``wanted`` of it."""
        parts = self._parts.get(name, ())
        if wanted is None or not parts:
            return [run for part in parts if (run := run_of(part)) is not None]
        plan = selected(parts[0].plain_shape, parts[0].shardings, wanted)
        found = {
            run
            for block in plan.blocks
            for part in parts
            if dict(part.coordinates) == block.coordinates and (run := run_of(part)) is not None
            if run.first < (block.rows.source + block.rows.length) * _width(part)
            if block.rows.source * _width(part) < run.first + run.numel
        }
        return sorted(found, key=lambda run: (run.file, run.first))

    def _read(self, name: str, run_of: RunOf, tensor_of: TensorOf, wanted: Selection | None) -> torch.Tensor:
        if name not in self._parts:
            raise CheckpointError(f"{self.folder}: {name} is in none of its files")
        plain = self._parts[name][0].plain_shape
        plan = selected(plain, self._parts[name][0].shardings, wanted or Selection())
        rows: torch.Tensor | None = None
        filled = 0
        for block in plan.blocks:
            found = self._rows(name, block, run_of, tensor_of)
            if found.shape == plan.shape:
                rows, filled = found, found.numel()
                continue
            rows = found.new_empty(plan.shape) if rows is None else rows
            for source, target in block.slices():
                rows[target] = found[source]
                filled += math.prod(each.stop - each.start for each in target)
        if filled != math.prod(plan.shape) and plan.numel:
            raise CheckpointError(
                f"{self.folder}: {filled} of {math.prod(plan.shape)} elements of {name} are in its files. What to do: "
                "copy the whole folder"
            )
        flat = torch.empty(0) if rows is None else rows.view(-1)[plan.skipped : plan.skipped + plan.numel]
        return flat.view(plain) if wanted is None else flat

    def _rows(self, name: str, block: Block, run_of: RunOf, tensor_of: TensorOf) -> torch.Tensor:
        """The rows of a block with all columns, joined from the runs in the files."""
        here = [part for part in self._parts[name] if dict(part.coordinates) == block.coordinates]
        where = f" at {dict(block.coordinates)}" if block.coordinates else ""
        if not here:
            raise CheckpointError(f"{self.folder}: no file has the part of {name}{where or ' at any rank'}")
        width = _width(here[0])
        reached = block.rows.source * width
        end = (block.rows.source + block.rows.length) * width
        held = {run for part in here if (run := run_of(part)) is not None and run.numel}
        runs = sorted(held, key=lambda run: run.first)
        pieces = []
        for run in runs:
            stop = min(run.first + run.numel, end)
            if run.first <= reached < stop:
                start = run.start + reached - run.first
                pieces.append(self._files.elements(run.file, tensor_of(run), start, stop - reached))
                reached = stop
        if reached != end:
            raise CheckpointError(
                f"{self.folder}: {reached} of the {here[0].numel} elements of {name}{where} are in its files. What to "
                "do: copy the whole folder"
            )
        flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        return flat.view(block.rows.length, *here[0].shape[1:])


def _width(part: WrittenPart) -> int:
    """Elements of a row of a part."""
    return math.prod(part.shape[1:])


def _has_all(tensor: object, run: WrittenRun) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.numel() >= run.start + run.numel
