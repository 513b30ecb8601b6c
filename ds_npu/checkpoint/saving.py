"""A sharded model's weights back as one Hugging Face checkpoint that the plain model loads."""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
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
from ds_npu.parallel.tensor.sharding import Sharding

Gather = Callable[[Any], AbstractContextManager[Any]]
"""Makes what a data-parallel engine has partitioned (ZeRO-3) whole on each of its ranks for a while."""

WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
"""What ENTRIES of ds_npu.checkpoint.files lead to."""


def whole_state_dict(
    model: nn.Module, group: dist.ProcessGroup, *, to_cpu: bool = True, gather: Gather = nullcontext
) -> dict[str, torch.Tensor]:
    """The whole Hugging Face state dict on the first rank of the tensor ``group``; an empty dict on the others.

    Called on all ranks of ``group``; weights pass one at a time, so that a rank needs memory for one rank's part of
    the largest, and the first rank for what it returns. Names of one parameter share one tensor, as in
    ``model.state_dict()``. Raises ValueError where a parameter is sharded over another number of ranks.
    """
    device = torch.device("cpu") if to_cpu else None
    first = dist.get_rank(group) == 0
    whole: dict[str, torch.Tensor] = {}
    by_id: dict[int, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if id(tensor) not in by_id:
            partitioned = isinstance(tensor, nn.Parameter)
            with gather(tensor) if partitioned else nullcontext(), torch.no_grad():
                by_id[id(tensor)] = _whole(name, tensor.detach(), part_of(tensor), group, device)
        if first:
            whole[name] = by_id[id(tensor)]
    return whole


def _whole(
    name: str, mine: torch.Tensor, sharding: Sharding | None, group: dist.ProcessGroup, device: torch.device | None
) -> torch.Tensor:
    """The whole weight on the group's first rank, and something empty on the others."""
    first = dist.get_rank(group) == 0
    if sharding is None:
        return mine.to(device or mine.device, copy=True) if first else mine.new_empty(0)
    size = dist.get_world_size(group)
    if len(sharding.ranges) != size:
        raise ValueError(f"{name} is sharded over {len(sharding.ranges)} ranks, but the tensor group has {size}")
    shape = list(mine.shape)
    shape[sharding.dim] = sharding.size if first else 0
    whole = mine.new_empty(shape, device=device)
    for rank in range(size):
        shape[sharding.dim] = sharding.length(rank)
        if not shape[sharding.dim] or (rank == 0 and not first):
            continue
        part = mine.contiguous() if rank == dist.get_rank(group) else mine.new_empty(shape)
        if rank:  # by broadcast, since point to point would open communicators
            dist.broadcast(part, group=group, group_src=rank)
        if first:
            place(whole, part, sharding, rank)
        del part  # before the next is made
    return whole


def place(whole: torch.Tensor, part: torch.Tensor, sharding: Sharding, rank: int) -> None:
    """Copy ``part``, which ``rank`` holds, to where it stands in ``whole``."""
    begin = 0
    for start, stop in sharding.ranges[rank]:
        length = stop - start
        whole.narrow(sharding.dim, start, length).copy_(part.narrow(sharding.dim, begin, length))
        begin += length


def save_pretrained(model: Any, folder: str | Path, state_dict: Mapping[str, torch.Tensor], **options: Any) -> None:
    """Write ``state_dict`` (whole weights) and ``model``'s config so that from_pretrained reads them back.

    Called on one rank. Names and conversions are those of the checkpoint that was loaded; ``options`` are those of
    transformers' save_pretrained (``max_shard_size``). Other files in ``folder`` stay, weights of an earlier save do
    not. Everything is written to a folder beside it first: what can be found under the name ``folder`` is the earlier
    checkpoint, no checkpoint, or the whole new one, wherever this is interrupted.
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
            _reach_the_disk(path)
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
    """The plain model of ``model``'s config on the meta device, which knows whole shapes; what has none is its own."""
    if not isinstance(model, PreTrainedModel) or vars(model).get("_hf_peft_config_loaded"):
        return model
    model_class: Any = type(model)
    with torch.device("meta"), set_zero3_state():
        plain = model_class._from_config(copy.deepcopy(model.config), dtype=model.dtype, attn_implementation="eager")
    # What transformers reverts on saving; without it, the conversions of the model's family.
    plain._weight_conversions = vars(model).get("_weight_conversions")
    if model.can_generate():
        plain.generation_config = model.generation_config
    return plain


def _reach_the_disk(path: Path) -> None:
    """Without it, a name may outlive the crash of a machine that its content does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_in(beside: Path, folder: Path) -> None:
    if not folder.exists():
        beside.rename(folder)
        return
    # Weights leave first, and what leads to the new ones (an index, or the only file) comes last.
    for path in sorted(folder.iterdir(), key=_leads_to_weights, reverse=True):
        if WEIGHTS.fullmatch(path.name):
            path.unlink()
    for path in sorted(beside.iterdir(), key=_leads_to_weights):
        path.replace(folder / path.name)
    beside.rmdir()


def _leads_to_weights(path: Path) -> bool:
    found = WEIGHTS.fullmatch(path.name)
    return found is not None and found[2] is None
