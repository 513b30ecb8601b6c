"""Writes the weights of a sharded model as one Hugging Face checkpoint, which the plain model loads."""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Callable, Mapping
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

    def shape_at(self, tensor_rank: int) -> list[int]:
        """The shape of what tensor rank ``tensor_rank`` holds."""
        sharding = self.sharding
        return [
            sharding.length(tensor_rank) if sharding is not None and dim == sharding.dim else length
            for dim, length in enumerate(self.shape)
        ]


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

    def whole(self, weight: HeldWeight, stage: int, mine: torch.Tensor | None, to_cpu: bool) -> torch.Tensor:
        """``weight`` of ``stage``, whole on the first rank; an empty tensor on others. ``mine``: what this rank holds.

        All ranks of the group call it, at the same time.
        """
        holders = 1 if weight.sharding is None else self.tensor_size
        first, like = self.rank == 0, torch.empty(0, dtype=weight.dtype, device=self.device)
        whole = like.new_empty(weight.shape if first else 0, device=torch.device("cpu") if to_cpu else None)
        for tensor_rank in range(holders):
            source, shape = stage * self.tensor_size + tensor_rank, weight.shape_at(tensor_rank)
            if 0 in shape or (source == 0 and not first):
                continue
            part = mine.contiguous() if mine is not None and source == self.rank else like.new_empty(shape)
            if source:  # Broadcast: point to point would open another communicator for each pair.
                dist.broadcast(part, group=self.group, group_src=source)
            if first and weight.sharding is None:
                whole.copy_(part)
            elif first and weight.sharding is not None:
                place(whole, part, weight.sharding, tensor_rank)
            del part  # Frees its memory before the next shard is allocated.
        return whole


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
    tensors = {name: each for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, torch.Tensor)}
    device = next((each.device for each in tensors.values()), torch.device("cpu"))
    holders = _Holders(group, stages, device)
    own = _held_weights(tensors, holders.tensor_size)
    everyones = [own]
    if stages > 1:
        everyones = [[] for _ in range(dist.get_world_size(group))]
        own = [replace(each, position=_position(model, each.name)) for each in own]
        dist.all_gather_object(everyones, own, group=group)
        everyones = everyones[:: holders.tensor_size]
    positions: dict[str, tuple[int, ...]] = {}
    whole: dict[str, torch.Tensor] = {}
    for stage, weights in enumerate(everyones):
        of_stage: dict[str, torch.Tensor] = {}
        for weight in weights:
            if weight.name in whole:  # Stands in every stage.
                continue
            if weight.same_as not in of_stage:
                tensor = tensors[weight.name] if stage == holders.rank // holders.tensor_size else None
                with gather(tensor) if isinstance(tensor, nn.Parameter) else nullcontext(), torch.no_grad():
                    mine = None if tensor is None else tensor.detach()
                    of_stage[weight.same_as] = holders.whole(weight, stage, mine, to_cpu)
            positions[weight.name], whole[weight.name] = weight.position, of_stage[weight.same_as]
    return {name: whole[name] for name in sorted(whole, key=positions.__getitem__)} if holders.rank == 0 else {}


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
