"""The files of swapped states that DeepSpeed without ds_npu adds to a checkpoint (``offload_optimizer`` "nvme")."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT
from deepspeed.checkpoint.ds_to_universal import dp_index_to_str

from ds_npu.checkpoint.files import CheckpointError
from ds_npu.zero_ext.swapped_states import swapped_masters

OFFLOADED = "offloaded_tensors"
"""The folder of these files in a checkpoint, with one folder for each rank."""
OF_MASTER = re.compile(r"(\d+)_\d+\.tensor\.swp")
"""The name of a master's file, with the numbers of its first and last weight; a moment's has its key in front."""
MOMENTUM = "momentum_buffer"
"""The key of Muon's momentum, which a setting of DeepSpeed keeps in memory."""


def put_offloaded(engine: Any, folder: Path, state: dict[str, Any]) -> None:
    """Put what a rank had on its disk into ``state``, the state dict of ZeRO 3's optimizer, if ``folder`` has files.

    In DeepSpeed's state dict these tensors may hold anything. Raises CheckpointError where a file is missing or too
    short, and where this run keeps other sub-groups on its disk.
    """
    rank = engine.local_rank if engine.use_node_local_storage() else dist.get_rank()
    files = folder / OFFLOADED / f"rank{dp_index_to_str(rank)}"
    optimizer = engine.optimizer
    if not files.is_dir():
        return
    masters = state[FP32_FLAT_GROUPS]
    states = state[OPTIMIZER_STATE_DICT]["state"]
    known = swapped_masters(optimizer)
    of_all = optimizer.fp32_partitioned_groups_flat
    # DeepSpeed numbers the weights of all models in a process: only the order of the names is known.
    found = [(int(match[1]), each.name) for each in files.iterdir() if (match := OF_MASTER.fullmatch(each.name))]
    if len(found) != len(known) or len(masters) != len(of_all):
        raise CheckpointError(
            f"{files} has {len(found)} of {len(masters)} sub-groups of ZeRO 3, which were on NVMe; this run has "
            f"{len(known)} of {len(of_all)} there. What to do: load it with the "
            "zero_optimization section and the number of ranks that wrote it, and save it: that goes on anywhere"
        )
    for (index, numel), (_, name) in zip(known.items(), sorted(found), strict=True):
        dtype = of_all[index].dtype
        masters[index] = _read(files / name, numel, dtype)
        own = states.get(index, {})
        for key, each in own.items():
            is_in_memory = key == MOMENTUM and optimizer.save_muon_momentum_buffer_in_memory
            if isinstance(each, torch.Tensor) and each.dim() > 0 and not is_in_memory:
                own[key] = _read(files / f"{key}-{name}", numel, dtype)


def _read(path: Path, numel: int, dtype: torch.dtype) -> torch.Tensor:
    size = numel * dtype.itemsize
    if not path.is_file() or path.stat().st_size < size:
        raise CheckpointError(
            f"{path} is not there, or shorter than {size} bytes: DeepSpeed wrote a part of the optimizer's states to a "
            "file of this name. What to do: an earlier checkpoint, or the zero_optimization section and the number of "
            "ranks that wrote this one"
        )
    return torch.from_file(str(path), size=numel, dtype=dtype)
