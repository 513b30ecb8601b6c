"""ZeRO-3 averages a gradient over the ranks that shard the parameter; the gradient rule wants another average.

Gradients are summed over all ranks that see other tokens and divided by dp: context peers return shares of a loss that
add up to it, and the tokens of an expert come from all ranks of its expert-parallel group. ``__avg_scatter_grads``
divides by the size of the group that shards the parameter (through ``reduce_scatter_coalesced``), and its all-reduce
twin divides by that size / cp (DeepSpeed 0.19.8 runtime/zero/stage3.py:1912, :1862; upstream issues 5555, 6841).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method

REDUCE_SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
ALL_REDUCE = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads"

Partitions = list[torch.Tensor]
Reduce = Callable[..., Partitions]


def average_over_data_ranks(optimizer: Any, topology: Topology) -> None:
    """Make ``optimizer``'s reductions divide by dp. Changes this instance only, and only where it divides otherwise."""
    dp, cp, has_experts = topology.size("dp"), topology.size("cp"), topology.size("ep", "etp") > 1
    wrong = {REDUCE_SCATTER: cp > 1 or has_experts, ALL_REDUCE: has_experts}
    if not any(wrong.values()):
        return

    def sharding_ranks(parameter: torch.nn.Parameter) -> int:
        return topology.size(*placement_of(parameter).data_axes)

    def reduce_scattered(reduce: Reduce, params: list[torch.nn.Parameter], dtype: torch.dtype) -> Partitions:
        return _scaled(reduce(params, dtype), sharding_ranks(params[0]) / dp)

    def all_reduced(reduce: Reduce, gradients: torch.Tensor, dtype: torch.dtype) -> Partitions:
        params = optimizer.ipg_buckets[dtype].params
        return _scaled(reduce(gradients, dtype), sharding_ranks(params[0]) / (dp * cp))

    for name, corrected in ((REDUCE_SCATTER, reduce_scattered), (ALL_REDUCE, all_reduced)):
        if wrong[name]:
            wrap_method(optimizer, name, corrected, MethodLevel.CORRECTION)


def _scaled(partitions: Partitions, factor: float) -> Partitions:
    return partitions if factor == 1 else [partition.mul_(factor) for partition in partitions]
