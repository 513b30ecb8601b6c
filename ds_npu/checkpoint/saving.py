"""Writes the weights of a sharded model as one Hugging Face checkpoint, which the plain model loads."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn

from ds_npu.checkpoint.files import UNTOUCHED, tensor_bytes, why_not_written
from ds_npu.checkpoint.loading import Coordinates, Part, same_elements, shardings_of
from ds_npu.models.guards import writer
from ds_npu.models.zero3 import unpartitioned_shape
from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.topology.degrees import NAMES, Axis

Gather = Callable[[nn.Parameter], AbstractContextManager[object]]
"""Makes a context within which a parameter that ZeRO-3 has partitioned is gathered, on each data rank."""

WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
"""Names of files of weights and of their indices (see ENTRIES of ds_npu.checkpoint.files)."""


@dataclass(frozen=True)
class HeldWeight:
    """A weight that the ranks of one stage hold, each the whole or a part of it."""

    name: str
    position: tuple[int, ...]
    """A key by which weights are sorted into the order of the plain model's state dict."""
    same_as: str
    """The first of the names that the tensor has in its stage."""
    shape: tuple[int, ...]
    """Shape of the whole weight."""
    dtype: torch.dtype
    sharded: Mapping[Axis, Sharding]
    is_expert: bool = False
    """Whether it is held on the expert view of the grid."""
    stage: int = 0
    """The pipeline stage whose ranks hold it."""

    def parts_at(self, coordinates: Coordinates) -> list[Part]:
        """The part that the rank at ``coordinates`` holds; empty where that is all of it."""
        return [(sharding, coordinates[axis]) for axis, sharding in self.sharded.items()]

    def shape_at(self, coordinates: Coordinates) -> list[int]:
        """The shape of the part that the rank at ``coordinates`` holds."""
        shape = list(self.shape)
        for sharding, rank in self.parts_at(coordinates):
            shape[sharding.dim] = sharding.length(rank)
        return shape


@dataclass(frozen=True)
class Destination:
    """The device and the ranks that receive gathered weights."""

    device: torch.device
    every_rank: bool
    """False: only the first of the group receives them."""


@dataclass(frozen=True)
class Holders:
    """The ranks of ``group``, stage after stage, which hold the weights of one view."""

    group: dist.ProcessGroup
    sizes: Mapping[Axis, int]
    """Sizes of the view's axes that shard weights, the fastest last; their product is a stage's ranks."""
    stages: int = 1

    @staticmethod
    def tensor_ranks(group: dist.ProcessGroup, stages: int = 1) -> Holders:
        """The tensor ranks of a model, or of each of its stages."""
        return Holders(group, {"tp": dist.get_world_size(group) // stages}, stages)

    @property
    def ranks_of_a_stage(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.rank // self.ranks_of_a_stage

    def of_all_stages(self, own: Sequence[HeldWeight]) -> list[HeldWeight]:
        """The weights of every stage, without values; ``own``: those of this rank's stage.

        All ranks of the group call it.
        """
        everyones: list[list[HeldWeight]] = [[] for _ in range(dist.get_world_size(self.group))]
        dist.all_gather_object(everyones, [replace(each, stage=self.stage) for each in own], group=self.group)
        # A weight may be in every stage: the first one's is taken.
        first: dict[str, HeldWeight] = {}
        for weights in everyones[:: self.ranks_of_a_stage]:
            for weight in weights:
                first.setdefault(weight.name, weight)
        return list(first.values())

    def coordinates(self, rank: int) -> Coordinates:
        """The index along each axis of ``rank``, which counts within a stage."""
        found: dict[Axis, int] = {}
        for axis, size in reversed(list(self.sizes.items())):
            rank, found[axis] = divmod(rank, size)
        return found

    def whole(
        self, weight: HeldWeight, mine: torch.Tensor | None, device: torch.device, to: Destination
    ) -> torch.Tensor:
        """A copy of ``weight``, whole at the destination; an empty tensor on other ranks.

        ``mine``: this rank's part of it, on ``device``. All ranks of the group call it, at the same time.
        """
        receives = to.every_rank or self.rank == 0
        like = torch.empty(0, dtype=weight.dtype, device=device)
        whole = like.new_empty(weight.shape if receives else 0, device=to.device)
        # Each rank has a copy of a replicated weight; ranks of other stages receive it.
        has_copy = not weight.sharded and self.stages == 1
        for rank in range(self.ranks_of_a_stage if weight.sharded else 1):
            coordinates = self.coordinates(rank)
            source = weight.stage * self.ranks_of_a_stage + rank
            shape = weight.shape_at(coordinates)
            is_sent = source != 0 or (to.every_rank and not has_copy)
            if 0 in shape or not (receives or is_sent):
                continue
            holds = mine is not None and (source == self.rank or (has_copy and receives))
            part = mine.contiguous() if mine is not None and holds else like.new_empty(shape)
            if is_sent:  # Broadcast: point to point would open another communicator for each pair.
                dist.broadcast(part, group=self.group, group_src=source)
            if receives:
                _put_part(whole, part, weight.parts_at(coordinates))
            del part  # Frees its memory before the next shard is allocated.
        return whole


@dataclass(frozen=True)
class ViewHolders:
    """The ranks that gather a model's weights; None for a view in whose gathering this rank has no part."""

    dense: Holders | None
    experts: Holders | None = None

    def of(self, weight: HeldWeight) -> Holders | None:
        return self.experts if weight.is_expert else self.dense


@dataclass(frozen=True)
class _HeldModel:
    """This rank's part of a model, and all weights of the plain model."""

    holders: ViewHolders
    tensors: Mapping[str, torch.Tensor]
    """This rank's tensors, by name."""
    weights: Sequence[HeldWeight]
    """Weights of all holders, in the order of the plain model's state dict, each name once."""
    device: torch.device

    @staticmethod
    def of(model: nn.Module, holders: ViewHolders) -> _HeldModel:
        """All ranks call it. Raises ValueError for a weight sharded over another number of ranks."""
        state = model.state_dict(keep_vars=True)
        tensors = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
        device = next((each.device for each in tensors.values()), torch.device("cpu"))
        own = _held_weights(tensors, holders)
        views = [view for view in (holders.dense, holders.experts) if view is not None]
        if all(view.stages == 1 for view in views):
            return _HeldModel(holders, tensors, own, device)
        own = [replace(each, position=_position(model, each.name)) for each in own]
        every = [each for view in views for each in view.of_all_stages([one for one in own if holders.of(one) is view])]
        return _HeldModel(holders, tensors, sorted(every, key=lambda weight: weight.position), device)

    def gathered(self, gather: Gather, to: Destination) -> Iterator[tuple[list[str], torch.Tensor]]:
        """Gather one tensor after the other at the destination; yields its names and a copy of it.

        All ranks consume the whole iterator at the same time. A rank gets no weight of a view in which it has no part.
        """
        names: dict[tuple[int, str], list[str]] = {}
        for weight in self.weights:
            names.setdefault((weight.stage, weight.same_as), []).append(weight.name)
        for weight in self.weights:
            same = names[weight.stage, weight.same_as]
            holders = self.holders.of(weight)
            if same[0] != weight.name:
                continue
            is_here = holders is None or weight.stage == holders.stage
            tensor = self.tensors[weight.name] if is_here else None
            whole: torch.Tensor | None = None
            # Left before the weight is yielded: what ZeRO-3 gathered is freed, and the caller may have gradients.
            with gather(tensor) if isinstance(tensor, nn.Parameter) else nullcontext(), torch.no_grad():
                if holders is not None:
                    whole = holders.whole(weight, None if tensor is None else tensor.detach(), self.device, to)
            if whole is not None:
                yield same, whole
                del whole  # Frees its memory before the next one is allocated, if the caller has not kept it.


def whole_state_dict(
    model: nn.Module, holders: ViewHolders, *, gather: Gather = nullcontext
) -> dict[str, torch.Tensor]:
    """Gather the plain model's state dict on the host of the first rank of all holders; the others return {}.

    All ranks that hold a part of it, and those that ``gather`` needs, call it. Weights are gathered one at a time: a
    rank needs memory for one shard of the largest weight, the first rank also for the result. Names of one parameter
    share one tensor, as in ``model.state_dict()``. Raises ValueError where a parameter is sharded over another number
    of ranks.
    """
    held = _HeldModel.of(model, holders)
    to = Destination(torch.device("cpu"), every_rank=False)
    whole = {name: each for names, each in held.gathered(gather, to) for name in names}
    is_first = holders.dense is not None and holders.dense.rank == 0
    return {weight.name: whole[weight.name] for weight in held.weights} if is_first else {}


def whole_weights(
    model: nn.Module, holders: ViewHolders, *, device: torch.device | None = None, gather: Gather = nullcontext
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of the plain model on every rank, one at a time, in the order of its state dict.

    As ``whole_state_dict``, but every rank receives the tensors, and one with several names comes once, under the
    first. Tensors are copies, on ``device`` (None: where the weights are). A rank needs memory for one whole tensor and
    one shard.
    """
    held = _HeldModel.of(model, holders)
    to = Destination(held.device if device is None else device, every_rank=True)
    for names, whole in held.gathered(gather, to):
        yield names[0], whole
        del whole  # Frees its memory, as in ``gathered``.


def _held_weights(tensors: Mapping[str, torch.Tensor], holders: ViewHolders) -> list[HeldWeight]:
    """The weights of this rank's stage, in the order of its state dict."""
    names_by_id: dict[int, str] = {}
    found: list[HeldWeight] = []
    for name, tensor in tensors.items():
        sharded = shardings_of(tensor)
        shape = list(unpartitioned_shape(tensor))
        for sharding in sharded.values():
            shape[sharding.dim] = sharding.size
        same_as = names_by_id.setdefault(id(tensor), name)
        is_expert = isinstance(tensor, nn.Parameter) and placement_of(tensor).is_expert
        weight = HeldWeight(name, (len(found),), same_as, tuple(shape), tensor.dtype, sharded, is_expert)
        mine = holders.of(weight)
        sizes: Mapping[Axis, int] = {axis: len(sharding.ranges) for axis, sharding in sharded.items()}
        for axis, size in sizes.items():
            found_size = size if mine is None else mine.sizes.get(axis, 1)
            if size != found_size:
                raise ValueError(f"{name} is sharded over {size} ranks, but the {NAMES[axis]} group has {found_size}")
        found.append(weight)
    return found


def _position(model: nn.Module, name: str) -> tuple[int, ...]:
    """The position of the weight ``name`` in a state dict, where a module's own weights come before its children's.

    Stages have the same modules, except inside those that are absent: positions agree over all of them.
    """
    *path, leaf = name.split(".")
    indices, module = [], model
    for attribute_name in path:
        indices.append(list(module._modules).index(attribute_name) + 1)
        module = module.get_submodule(attribute_name)
    return (*indices, 0, [*module._parameters, *module._buffers].index(leaf))


def _put_part(whole: torch.Tensor, part: torch.Tensor, parts: Sequence[Part]) -> None:
    """Copy ``part``, which one rank holds, to its indices in ``whole``."""
    for held, home in same_elements(part, whole, parts):
        home.copy_(held)


def save_pretrained(model: Any, folder: str | Path, state_dict: Mapping[str, torch.Tensor], **options: Any) -> None:
    """Write ``state_dict`` (whole weights) and the config of ``model`` so that from_pretrained reads them.

    One rank calls it. Names and conversions are those of the checkpoint that was loaded; ``options`` are those of
    transformers' save_pretrained (``max_shard_size``). Weights of an earlier save in ``folder`` are replaced, other
    files are kept. Everything is first written to a folder next to it: wherever this is interrupted, ``folder`` holds
    the earlier checkpoint, no checkpoint, or the whole new one.
    Raises OSError, with ``folder`` as before, where it cannot be written (a full disk).
    """
    folder = Path(os.path.abspath(folder))
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file; a checkpoint is a folder")
    incomplete = folder.with_name(f".{folder.name}.incomplete")
    complete = False
    try:
        shutil.rmtree(incomplete, ignore_errors=True)
        incomplete.mkdir(parents=True)
        writer(model).save_pretrained(incomplete, state_dict=dict(state_dict), **options)
        for path in incomplete.rglob("*"):
            _flush(path)
        complete = True
    except (OSError, SafetensorError) as error:
        shutil.rmtree(incomplete, ignore_errors=True)
        why = why_not_written(error, folder, tensor_bytes(state_dict))
        raise OSError(f"the checkpoint was not saved to {folder}: {why}. {UNTOUCHED}") from error
    finally:
        if not complete:
            shutil.rmtree(incomplete, ignore_errors=True)
    _move_in(incomplete, folder)


def _flush(path: Path) -> None:
    """Flush a file or folder to disk: else a crash of the machine could leave a name without its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_in(incomplete: Path, folder: Path) -> None:
    if not folder.exists():
        incomplete.rename(folder)
        return
    # Remove the old weights first; move the new index, or only file of weights, last.
    for path in sorted(folder.iterdir(), key=_leads_to_weights, reverse=True):
        if WEIGHTS.fullmatch(path.name):
            path.unlink()
    for path in sorted(incomplete.iterdir(), key=_leads_to_weights):
        path.replace(folder / path.name)
    incomplete.rmdir()


def _leads_to_weights(path: Path) -> bool:
    found = WEIGHTS.fullmatch(path.name)
    return found is not None and found[2] is None
