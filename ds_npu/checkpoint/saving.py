"""Writes the weights of a sharded model as one Hugging Face checkpoint, which the plain model loads."""

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
from ds_npu.models.attributes import attribute
from ds_npu.parallel.tensor.sharding import Sharding

Gather = Callable[[nn.Parameter], AbstractContextManager[object]]
"""Gathers a parameter that ZeRO-3 has partitioned on each data rank, within the context."""

WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
"""Names of files of weights and of their indices (see ENTRIES of ds_npu.checkpoint.files)."""


def whole_state_dict(
    model: nn.Module, group: dist.ProcessGroup, *, to_cpu: bool = True, gather: Gather = nullcontext
) -> dict[str, torch.Tensor]:
    """Gather the whole Hugging Face state dict on the first rank of the tensor ``group``; the others return {}.

    All ranks of ``group`` call it. Weights are gathered one at a time: a rank needs memory for one shard of the largest
    weight, the first rank also for the result. Names of one parameter share one tensor, as in ``model.state_dict()``.
    Raises ValueError where a parameter is sharded over another number of ranks.
    """
    device = torch.device("cpu") if to_cpu else None
    first = dist.get_rank(group) == 0
    whole: dict[str, torch.Tensor] = {}
    by_id: dict[int, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if id(tensor) not in by_id:
            with gather(tensor) if isinstance(tensor, nn.Parameter) else nullcontext(), torch.no_grad():
                by_id[id(tensor)] = _whole(name, tensor.detach(), part_of(tensor), group, device)
        if first:
            whole[name] = by_id[id(tensor)]
    return whole


def _whole(
    name: str, mine: torch.Tensor, sharding: Sharding | None, group: dist.ProcessGroup, device: torch.device | None
) -> torch.Tensor:
    """The whole weight on the group's first rank; an empty tensor on the others."""
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
        if rank:  # Broadcast: point to point would open another communicator for each pair.
            dist.broadcast(part, group=group, group_src=rank)
        if first:
            place(whole, part, sharding, rank)
        del part  # Frees its memory before the next shard is allocated.
    return whole


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
