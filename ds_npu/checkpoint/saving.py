"""Writes the weights of a sharded model as one Hugging Face checkpoint, which the plain model loads."""

from __future__ import annotations

import copy
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
from transformers import PreTrainedModel
from transformers.modeling_utils import set_zero3_state

from ds_npu.checkpoint.disk import UNTOUCHED, tensor_bytes, why_not_written
from ds_npu.checkpoint.loading import part_of
from ds_npu.models.attributes import attribute
from ds_npu.models.zero3 import unpartitioned_shape
from ds_npu.parallel.tensor.sharding import Sharding

Gather = Callable[[nn.Parameter], AbstractContextManager[object]]
"""Gathers a parameter that ZeRO-3 has partitioned on each data rank, within the context."""

WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
"""Names of files of weights and of their indices (see ENTRIES of ds_npu.checkpoint.files)."""


@dataclass(frozen=True)
class HeldWeight:
    """A weight that the tensor ranks of one stage hold, each the whole or its shard."""

    name: str
    position: tuple[int, ...]
    """Its place in the plain model's state dict, in the order of these numbers."""
    same_as: str
    """The first name in its stage of the same tensor; its own where it has one name."""
    shape: tuple[int, ...]
    """Of the whole weight."""
    dtype: torch.dtype
    sharding: Sharding | None
    stage: int = 0
    """The pipeline stage whose ranks hold it."""

    def shape_at(self, tensor_rank: int) -> list[int]:
        """The shape of what tensor rank ``tensor_rank`` holds."""
        sharding = self.sharding
        return [
            sharding.length(tensor_rank) if sharding is not None and dim == sharding.dim else length
            for dim, length in enumerate(self.shape)
        ]


@dataclass(frozen=True)
class Destination:
    """Where gathered weights are to be."""

    device: torch.device
    every_rank: bool
    """Otherwise only the first of the group."""


@dataclass(frozen=True)
class _Holders:
    """The ranks of ``group``, which hold a model: those of each of ``stages`` stages one after the other."""

    group: dist.ProcessGroup
    stages: int
    device: torch.device
    """Of the weights that they hold."""

    @property
    def tensor_size(self) -> int:
        return dist.get_world_size(self.group) // self.stages

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def whole(self, weight: HeldWeight, mine: torch.Tensor | None, to: Destination) -> torch.Tensor:
        """A copy of ``weight``, whole at the destination; an empty tensor on other ranks.

        ``mine``: what this rank holds of it. All ranks of the group call it, at the same time.
        """
        receives = to.every_rank or self.rank == 0
        like = torch.empty(0, dtype=weight.dtype, device=self.device)
        whole = like.new_empty(weight.shape if receives else 0, device=to.device)
        # Of a replicated weight each tensor rank has a copy; those of other stages receive it.
        has_copy = weight.sharding is None and self.stages == 1
        for tensor_rank in range(1 if weight.sharding is None else self.tensor_size):
            source, shape = weight.stage * self.tensor_size + tensor_rank, weight.shape_at(tensor_rank)
            is_sent = source != 0 or (to.every_rank and not has_copy)
            if 0 in shape or not (receives or is_sent):
                continue
            holds = mine is not None and (source == self.rank or (has_copy and receives))
            part = mine.contiguous() if mine is not None and holds else like.new_empty(shape)
            if is_sent:  # Broadcast: point to point would open another communicator for each pair.
                dist.broadcast(part, group=self.group, group_src=source)
            if receives and weight.sharding is None:
                whole.copy_(part)
            elif receives and weight.sharding is not None:
                place(whole, part, weight.sharding, tensor_rank)
            del part  # Frees its memory before the next shard is allocated.
        return whole


@dataclass(frozen=True)
class _HeldModel:
    """A model over its holders, and the weights of the plain model that it stands for."""

    holders: _Holders
    tensors: Mapping[str, torch.Tensor]
    """What this rank holds, by name."""
    weights: Sequence[HeldWeight]
    """Of all holders, in the order of the plain model's state dict, each name once."""

    @staticmethod
    def of(model: nn.Module, group: dist.ProcessGroup, stages: int) -> _HeldModel:
        """All ranks of ``group`` call it. Raises ValueError for a weight sharded over another number of ranks."""
        state = model.state_dict(keep_vars=True)
        tensors = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
        device = next((each.device for each in tensors.values()), torch.device("cpu"))
        holders = _Holders(group, stages, device)
        own = _held_weights(tensors, holders.tensor_size)
        if stages == 1:
            return _HeldModel(holders, tensors, own)
        stage = holders.rank // holders.tensor_size
        everyones: list[list[HeldWeight]] = [[] for _ in range(dist.get_world_size(group))]
        own = [replace(each, stage=stage, position=_position(model, each.name)) for each in own]
        dist.all_gather_object(everyones, own, group=group)
        # A weight may stand in every stage: the first one's is taken.
        first: dict[str, HeldWeight] = {}
        for weights in everyones[:: holders.tensor_size]:
            for weight in weights:
                first.setdefault(weight.name, weight)
        return _HeldModel(holders, tensors, sorted(first.values(), key=lambda weight: weight.position))

    def gathered(self, gather: Gather, to: Destination) -> Iterator[tuple[list[str], torch.Tensor]]:
        """Gather one tensor after the other at the destination; yields its names and a copy of it.

        All ranks of the group take all of it together.
        """
        holders = self.holders
        own_stage = holders.rank // holders.tensor_size
        names: dict[tuple[int, str], list[str]] = {}
        for weight in self.weights:
            names.setdefault((weight.stage, weight.same_as), []).append(weight.name)
        for weight in self.weights:
            same = names[weight.stage, weight.same_as]
            if same[0] != weight.name:
                continue
            tensor = self.tensors[weight.name] if weight.stage == own_stage else None
            # Left before the weight is yielded: what ZeRO-3 gathered is freed, and the caller may have gradients.
            with gather(tensor) if isinstance(tensor, nn.Parameter) else nullcontext(), torch.no_grad():
                whole = holders.whole(weight, None if tensor is None else tensor.detach(), to)
            yield same, whole
            del whole  # Frees its memory before the next one is allocated, if the caller has not kept it.


def whole_state_dict(
    model: nn.Module,
    group: dist.ProcessGroup,
    *,
    stages: int = 1,
    to_cpu: bool = True,
    gather: Gather = nullcontext,
) -> dict[str, torch.Tensor]:
    """Gather the plain model's state dict on the first rank of ``group``; the others return {}.

    All ranks of ``group`` call it: the tensor ranks of the model, or of each of its pipeline ``stages`` one after the
    other. Weights are gathered one at a time: a rank needs memory for one shard of the largest weight, the first rank
    also for the result. Names of one parameter share one tensor, as in ``model.state_dict()``. Raises ValueError where
    a parameter is sharded over another number of ranks.
    """
    held = _HeldModel.of(model, group, stages)
    to = Destination(torch.device("cpu") if to_cpu else held.holders.device, every_rank=False)
    whole = {name: each for names, each in held.gathered(gather, to) for name in names}
    return {weight.name: whole[weight.name] for weight in held.weights} if held.holders.rank == 0 else {}


def whole_weights(
    model: nn.Module,
    group: dist.ProcessGroup,
    *,
    stages: int = 1,
    device: torch.device | None = None,
    gather: Gather = nullcontext,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of the plain model on every rank of ``group``, one at a time, in its order.

    As ``whole_state_dict``, but a tensor with several names comes once, under the first. Tensors are copies, on
    ``device`` (None: where the weights are). A rank needs memory for one whole tensor and one shard.
    """
    held = _HeldModel.of(model, group, stages)
    to = Destination(held.holders.device if device is None else device, every_rank=True)
    for names, whole in held.gathered(gather, to):
        yield names[0], whole
        del whole  # As gathered does.


def _held_weights(tensors: Mapping[str, torch.Tensor], tensor_size: int) -> list[HeldWeight]:
    """The weights of this rank's stage, in the order of its state dict."""
    names_by_id: dict[int, str] = {}
    found: list[HeldWeight] = []
    for name, tensor in tensors.items():
        sharding, shape = part_of(tensor), list(unpartitioned_shape(tensor))
        if sharding is not None and len(sharding.ranges) != tensor_size:
            raise ValueError(
                f"{name} is sharded over {len(sharding.ranges)} ranks, but the tensor group has {tensor_size}"
            )
        if sharding is not None:
            shape[sharding.dim] = sharding.size
        same_as = names_by_id.setdefault(id(tensor), name)
        found.append(HeldWeight(name, (len(found),), same_as, tuple(shape), tensor.dtype, sharding))
    return found


def _position(model: nn.Module, name: str) -> tuple[int, ...]:
    """The place of the weight ``name`` in a state dict, in which each module's own come before those of its children.

    Stages have the same modules, but for the inside of those that are absent: positions agree over all of them.
    """
    *path, leaf = name.split(".")
    place, module = [], model
    for attribute_name in path:
        place.append(list(module._modules).index(attribute_name) + 1)
        module = module.get_submodule(attribute_name)
    own = [*module._parameters, *module._buffers]
    return (*place, 0, own.index(leaf))


def place(whole: torch.Tensor, part: torch.Tensor, sharding: Sharding, rank: int) -> None:
    """Copy ``part``, the shard of ``rank``, to its place in ``whole``."""
    begin = 0
    for start, stop in sharding.ranges[rank]:
        length = stop - start
        whole.narrow(sharding.dim, start, length).copy_(part.narrow(sharding.dim, begin, length))
        begin += length


def save_pretrained(model: Any, folder: str | Path, state_dict: Mapping[str, torch.Tensor], **options: Any) -> None:
    """Write ``state_dict`` (whole weights) and the config of ``model`` so that from_pretrained reads them.

    One rank calls it. Names and conversions are those of the checkpoint that was loaded; ``options`` are those of
    transformers' save_pretrained (``max_shard_size``). Weights of an earlier save in ``folder`` are replaced, other
    files are kept. Everything is first written to a folder beside it: wherever this is interrupted, ``folder`` holds
    the earlier checkpoint, no checkpoint, or the whole new one.
    Raises OSError, with ``folder`` as before, where it cannot be written (a full disk).
    """
    folder = Path(os.path.abspath(folder))
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file; a checkpoint is a folder")
    beside = folder.with_name(f".{folder.name}.incomplete")
    complete = False
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        writer(model).save_pretrained(beside, state_dict=dict(state_dict), **options)
        for path in beside.rglob("*"):
            _flush(path)
        complete = True
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        why = why_not_written(error, folder, tensor_bytes(state_dict))
        raise OSError(f"the checkpoint was not saved to {folder}: {why}. {UNTOUCHED}") from error
    finally:
        if not complete:
            shutil.rmtree(beside, ignore_errors=True)
    _move_in(beside, folder)


def writer(model: Any) -> Any:
    """The plain model of ``model``'s config on the meta device, whose save_pretrained takes whole weights.

    ``model`` itself where it is not transformers', or holds adapters.
    """
    if not isinstance(model, PreTrainedModel) or model._hf_peft_config_loaded:
        return model
    model_class: Any = type(model)
    with torch.device("meta"), set_zero3_state():
        plain = model_class._from_config(copy.deepcopy(model.config), dtype=model.dtype, attn_implementation="eager")
    # transformers reverts these on saving; without them, the conversions of the model's family.
    plain._weight_conversions = attribute(model, "_weight_conversions", list)
    if model.can_generate():
        plain.generation_config = model.generation_config
    return plain


def _flush(path: Path) -> None:
    """Flush a file or folder to disk: after a crash of the machine, a name could else be there without its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_in(beside: Path, folder: Path) -> None:
    if not folder.exists():
        beside.rename(folder)
        return
    # Remove the old weights first; move the new index, or only file of weights, last.
    for path in sorted(folder.iterdir(), key=_leads_to_weights, reverse=True):
        if WEIGHTS.fullmatch(path.name):
            path.unlink()
    for path in sorted(beside.iterdir(), key=_leads_to_weights):
        path.replace(folder / path.name)
    beside.rmdir()


def _leads_to_weights(path: Path) -> bool:
    found = WEIGHTS.fullmatch(path.name)
    return found is not None and found[2] is None
