"""``ds_npu.moe.capacity_factor``: the choices of a rank's tokens that one layer drops, and how it pads to capacity.

Capacity is counted on the tokens that a rank holds of one micro-batch when they reach the experts: tensor ranks with
equal tokens count all of them, before they take their shares; ranks of a sequence (sequence parallel, context) count
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ds_npu.comm.collectives import all_gather
from ds_npu.config.moe import MoeSection
from ds_npu.features.declaration import Change
from ds_npu.models import names
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.capacity import CapacityPolicy, Compute, capacity_of, compute_padded, within_capacity
from ds_npu.parallel.runtime.forward_wraps import Level, P, R, wrap_forward
from ds_npu.parallel.runtime.micro_batch import Fact, new_forward, running

_MOST: Fact[dict[str, int]] = Fact()
"""The most tokens that any rank has in a layer, by the layer's name without its number."""


@dataclass(frozen=True)
class CapacityLimit:
    """The capacity of the experts of one layer."""

    factor: float
    policy: CapacityPolicy
    pads: bool
    pieces: int
    """The number of pieces of a layer's tokens, which are computed one after the other."""
    experts: int
    """The number of experts of all ranks."""
    kind: str
    """The layer's name without its number: layers of one kind have equally many tokens."""

    @staticmethod
    def of(section: MoeSection, experts: int, name: str) -> CapacityLimit | None:
        """The limit of the module ``name``; None without one."""
        if section.capacity_factor is None:
            return None
        policy = section.capacity_policy
        pads = section.pad_to_capacity
        pieces = 2 if section.overlap else 1
        return CapacityLimit(section.capacity_factor, policy, pads, pieces, experts, names.generic(name))

    def __str__(self) -> str:
        return f"capacity {self.factor:g} by {self.policy}" + (", padded" if self.pads else "")

    def within(self, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """``ids`` [T, K] with -1 for choices beyond the capacity of their expert."""
        capacity = capacity_of(len(ids_TK), ids_TK.shape[1], self.experts, self.factor)
        return within_capacity(ids_TK, weights_TK, self.experts, capacity, self.policy)

    def compute(
        self, compute: Compute, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, axis: ExpertAxis
    ) -> torch.Tensor:
        """Call ``compute`` with choices that are ``within`` capacity, each expert's rows padded if ``pads``."""
        if not self.pads:
            return compute(x_TH, ids_TK, weights_TK)
        most = _most_tokens(ids_TK, self.kind, axis)
        # No token chooses an expert twice.
        slots = min(most, capacity_of(most, ids_TK.shape[1], self.experts, self.factor))
        ranks = 1 if axis.same_tokens is None else dist.get_world_size(axis.same_tokens)
        slots += -slots % (ranks * self.pieces)
        return compute_padded(compute, x_TH, ids_TK, weights_TK, self.experts, slots)


def _most_tokens(ids_TK: torch.Tensor, kind: str, axis: ExpertAxis) -> int:
    """The most tokens of any rank; the host waits for them in the first layer of a kind in each forward."""
    if axis.size == 1:
        return len(ids_TK)
    known = _MOST.of(running())
    found = None if known is None else known.get(kind)
    if found is None:
        found = max(all_gather(ids_TK.new_full((1,), len(ids_TK)), 0, axis.group).wait().tolist())
        if known is not None:
            known[kind] = found
    if len(ids_TK) > found:
        raise RuntimeError(
            f"ds_npu.moe.pad_to_capacity: {kind} has {len(ids_TK)} tokens in one layer, and at most {found} on any "
            "rank in another of the same forward, so that its sizes are not known. What to do: pad_to_capacity false"
        )
    return found


def agrees_on_tokens(model: nn.Module) -> Change:
    """The change by which only the first layer of a kind in a forward asks all ranks for their tokens."""

    def begun(forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        with new_forward() as micro_batch:
            _MOST.set(micro_batch, {})
            return forward(*args, **kwargs)

    make = partial(wrap_forward, model, begun, Level.MODEL)
    return Change("wraps", "", "ranks agree on their tokens", make, Level.MODEL)
