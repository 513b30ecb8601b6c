"""Where each of DeepSpeed's optimizers has the float32 weights that it steps, and their state, in its state dict."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_npu.zero_ext.optimizer_state import masters_of
from ds_npu.zero_ext.swapped_states import swapped_masters

Keys = tuple[str | int, ...]


class FlatRun(NamedTuple):
    """A rank's elements of one weight's part, in one of the tensors that the inner optimizer steps."""

    flat: int
    """The index of that tensor."""
    start: int
    first: int
    """Index of the first element in the weight's part, flat."""
    numel: int
    group: int
    """The index among the inner optimizer's parameter groups."""
    keys: Keys
    """The path to that tensor from the list of all."""


@dataclass(frozen=True)
class OptimizerLayout:
    """Positions of weights and states in the state dict of an optimizer, on this rank."""

    inner: torch.optim.Optimizer
    flats: Sequence[torch.Tensor]
    """The tensors that ``inner`` steps, by index; on the meta device where ZeRO 3 has them on a disk."""
    values: Keys | None
    """The path to the list of ``flats``; None: they are the weights, by name in the model's state dict."""
    states: Keys
    """The path to the state dict of ``inner``."""
    runs: Mapping[int, FlatRun]
    """Runs by the id of a weight that has elements on this rank."""


ZERO = "optimizer_state_dict"
"""The key of a ZeRO optimizer's state dict in its file."""
PLAIN = "optimizer"
"""The key of an optimizer's state dict in the file of a model."""
MASTERS = "single_partition_of_fp32_groups"
"""The key of float32 weights in the state dicts of ZeRO 1 and 2 and BF16_Optimizer."""


def layout_of_optimizer(optimizer: Any, weights: Iterable[nn.Parameter]) -> OptimizerLayout | None:
    """The layout of ``weights`` in ``optimizer``, the engine's; None for one whose layout is not known."""
    if isinstance(optimizer, FP16_Optimizer | FP16_UnfusedOptimizer):
        is_flat = isinstance(optimizer, FP16_Optimizer)
        keys = (PLAIN, "fp32_groups_flat" if is_flat else "fp32_groups"), (PLAIN, "optimizer_state_dict")
        runs = (_one_after_the_other if is_flat else _one_by_one)(optimizer.fp16_groups)
        return OptimizerLayout(optimizer.optimizer, _masters(optimizer), *keys, dict(runs))
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = [group["params"] for group in optimizer.param_groups]
        flats = [weight for group in groups for weight in group]
        known = {id(each) for each in weights}.issuperset(map(id, flats))
        return OptimizerLayout(optimizer, flats, None, (PLAIN,), dict(_one_by_one(groups))) if known else None
    return _sharded(optimizer)


def _sharded(optimizer: Any) -> OptimizerLayout | None:
    """The layout of an optimizer that is sharded over data ranks, each with a file of its own."""
    # Not of their subclasses (ZenFlow, SuperOffload), which hold more.
    kind = type(optimizer)
    keys = ((ZERO, MASTERS), (ZERO, "base_optimizer_state"))
    # With offload_param other attributes hold the weights.
    if kind is DeepSpeedZeroOptimizer_Stage3 and not optimizer.offload_param:
        keys = ((ZERO, "fp32_flat_groups"), (ZERO, "optimizer_state_dict"))
        runs = _of_stage_3(optimizer)
    elif kind is BF16_Optimizer:
        runs = _of_fragments(optimizer.bf16_groups)
    elif kind is DeepSpeedZeroOptimizer and not optimizer.elastic_checkpoint:
        runs = _of_partitions(optimizer)
    else:
        return None
    return OptimizerLayout(optimizer.optimizer, _masters(optimizer), *keys, dict(runs))


def _masters(optimizer: Any) -> list[torch.Tensor]:
    masters = [master for master, _ in masters_of(optimizer)]
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for index, numel in swapped_masters(optimizer).items():
            masters[index] = torch.empty(numel, dtype=masters[index].dtype, device="meta")
    return masters


def _one_by_one(groups: Sequence[Sequence[torch.Tensor]]) -> Iterator[tuple[int, FlatRun]]:
    positions = [(group, index) for group, held in enumerate(groups) for index in range(len(held))]
    for flat, (group, index) in enumerate(positions):
        weight = groups[group][index]
        yield id(weight), FlatRun(flat, 0, 0, weight.numel(), group, (group, index))


def _of_fragments(groups: Sequence[Sequence[Any]]) -> Iterator[tuple[int, FlatRun]]:
    for index, group in enumerate(groups):
        for weight in group:
            mapping = weight._hp_mapping
            if mapping is not None:
                held = mapping.hp_fragment_address
                first = mapping.lp_fragment_address.start
                yield id(weight), FlatRun(index, held.start, first, held.numel, index, (index,))


def _of_partitions(optimizer: Any) -> Iterator[tuple[int, FlatRun]]:
    """Runs of ZeRO 1 and 2, without ``_hp_mapping``, which is wrong with ``round_robin_gradients`` (0.19.8)."""
    for index, weights in enumerate(optimizer.round_robin_bit16_groups):
        size = optimizer.single_partition_of_fp32_groups[index].numel()
        begin = size * dist.get_rank(group=optimizer.real_dp_process_group[index])
        # Releases that tell no offsets have no padding between weights.
        told = getattr(optimizer, "round_robin_bit16_offsets", None)
        offsets = told[index] if told else [0, *itertools.accumulate(each.numel() for each in weights[:-1])]
        for weight, offset in zip(weights, offsets, strict=True):
            start = max(offset, begin)
            stop = min(offset + weight.numel(), begin + size)
            if start < stop:
                yield id(weight), FlatRun(index, start - begin, start - offset, stop - start, index, (index,))


def _of_stage_3(optimizer: Any) -> Iterator[tuple[int, FlatRun]]:
    for group in optimizer.fp16_groups:
        for weight in group:
            index, start, numel = optimizer.grad_position[optimizer.get_param_id(weight)]
            first = numel * optimizer._get_param_partition_rank(weight)
            held = max(min(numel, weight.ds_numel - first), 0)
            if held:
                yield id(weight), FlatRun(index, start, first, held, optimizer.sub_group_to_group_id[index], (index,))


def _one_after_the_other(groups: Sequence[Sequence[torch.Tensor]]) -> Iterator[tuple[int, FlatRun]]:
    for index, group in enumerate(groups):
        start = 0
        for weight in group:
            yield id(weight), FlatRun(index, start, 0, weight.numel(), index, (index,))
            start += weight.numel()
