"""Ranks that hold the same tokens take a share of them each, so that no token is computed twice."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional

from ds_npu.comm.crossing import collect, shard

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [T, H], ids [T, K], weights [T, K]) -> [T, H], row by row."""


def compute_in_shares(
    compute: Compute, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Call ``compute`` with this rank's share of tokens that all ranks of ``group`` hold; gather the whole result.

    Where the ranks do not divide T, the last shares are padded with rows of no expert (id -1).
    """
    size, tokens = dist.get_world_size(group), len(x_TH)
    missing = -tokens % size
    padded = (0, 0, 0, missing)
    x, weights = (functional.pad(each, padded) if missing else each for each in (x_TH, weights_TK))
    ids = functional.pad(ids_TK, padded, value=-1) if missing else ids_TK
    mine = ids.chunk(size)[dist.get_rank(group)]
    out = compute(shard(x, 0, group), mine, shard(weights, 0, group))
    return collect(out, 0, group)[:tokens]
