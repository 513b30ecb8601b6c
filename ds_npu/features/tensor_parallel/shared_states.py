"""Mamba 2 whose groups of heads are divided between tensor ranks: B and C are those of a group, heads those of a rank.

Each rank has a part of the columns of B and C in ``in_proj``, and gathers what it projects: all ranks of a group need
all of both. The convolution, whose weights are few, is whole on each rank, which uses its channels of x and its group's
of B and C. The norm over a group divides by the mean over the ranks that share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from ds_npu.comm.crossing import copy, gather, reduce
from ds_npu.models.attributes import attribute, with_attributes
from ds_npu.models.kinds import own_shapes
from ds_npu.models.linear_attention import LinearAttention, linear_attention_of
from ds_npu.ops.precision import for_accumulation
from ds_npu.parallel.runtime.forward_wraps import Level, P, R, replace_innermost_forward, wrap_forward
from ds_npu.parallel.tensor.axis import TensorAxis
from ds_npu.parallel.tensor.sharding import Ranges

COUNTED = ("n_groups", "num_heads", "ssm_state_size")
GROUPED = ("group_size", "variance_epsilon")
"""The attributes of transformers' gated norm that is over groups, with the gate before the norm."""


@dataclass(frozen=True)
class SharedStates:
    """The part of one layer that ``rank`` of ``size`` computes; all numbers are those of the whole layer."""

    size: int
    rank: int
    groups: int
    heads: int
    width: int
    """The columns of a head."""
    state: int

    @property
    def inner(self) -> int:
        """The columns of x that a rank has."""
        return self.heads * self.width // self.size

    @property
    def group(self) -> int:
        """The group that this rank's heads belong to."""
        return self.rank * self.groups // self.size

    def counts(self) -> dict[str, int]:
        """The attributes of the layer that count what this rank computes."""
        return {"n_groups": 1, "conv_dim": self.inner + 2 * self.state}

    def convolved(self) -> Ranges:
        """The channels of the whole convolution that this rank uses: of x, of B and of C."""
        begin = self.rank * self.inner
        of_b = self.size * self.inner + self.group * self.state
        of_c = of_b + self.groups * self.state
        return (begin, begin + self.inner), (of_b, of_b + self.state), (of_c, of_c + self.state)

    def projected(self) -> Ranges:
        """The outputs of the whole ``in_proj`` that this rank has once B and C are gathered."""
        total = self.size * self.inner
        heads = self.heads // self.size
        begin = self.rank * self.inner
        of_dt = 2 * total + 2 * self.groups * self.state + self.rank * heads
        of_x = ((start + total, stop + total) for start, stop in self.convolved())
        return (begin, begin + self.inner), *of_x, (of_dt, of_dt + heads)

    def gather_states(self, layer: nn.Module, axis: TensorAxis) -> None:
        """Make ``in_proj``, which has a part of the columns of B and C, return all columns of this rank's group."""
        wrap_forward(layer.get_submodule("in_proj"), partial(self._gathered, axis), Level.REGION)

    def use_own_channels(self, layer: nn.Module) -> None:
        """Make ``layer`` compute with only this rank's channels of the whole convolution."""
        wrap_forward(layer, partial(self._with_own_channels, layer.get_submodule("conv1d")), Level.REGION)

    def normalise_over_ranks(self, layer: nn.Module, axis: TensorAxis) -> None:
        """Make the norm of ``layer`` divide by the mean over all columns of the group."""
        norm = layer.get_submodule("norm")
        replace_innermost_forward(norm, partial(self._normalised, norm, axis))

    def _gathered(
        self, axis: TensorAxis, forward: Callable[P, torch.Tensor], *args: P.args, **kwargs: P.kwargs
    ) -> torch.Tensor:
        part = self.groups * self.state // self.size
        sizes = [2 * self.inner, part, part, self.heads // self.size]
        x, b, c, dt = torch.split(forward(*args, **kwargs), sizes, -1)
        # One collective for both: [..., ranks, 2, part].
        every = torch.unflatten(gather(torch.cat([b, c], -1), -1, axis.group), -1, (self.size, 2, part))
        b, c = (each.flatten(-2)[..., self.group * self.state :][..., : self.state] for each in every.unbind(-2))
        return torch.cat([x, b, c, dt], -1)

    def _with_own_channels(
        self, convolution: nn.Module, forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        whole = {name: convolution.get_parameter(name) for name in own_shapes(convolution)}
        own = {name: torch.cat([each[start:stop] for start, stop in self.convolved()]) for name, each in whole.items()}
        with with_attributes(convolution, own):
            return forward(*args, **kwargs)

    def _normalised(
        self, norm: nn.Module, axis: TensorAxis, x: torch.Tensor, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        """This rank's columns of the norm over its group."""
        over, eps = (attribute(norm, name, kind) for name, kind in zip(GROUPED, (int, float), strict=True))
        assert over is not None and eps is not None, "the layer was looked at"
        wide = for_accumulation(x)
        wide = wide if gate is None else wide * functional.silu(for_accumulation(gate))
        squares = wide.square().sum(-1, keepdim=True)
        by_group = functional.pad(squares, (self.group, self.groups - 1 - self.group))
        # Each rank adds its squares, and uses the sum of its group for its part: its gradient is a summand, too.
        total = copy(reduce(by_group, axis.group), axis.group)[..., self.group : self.group + 1]
        weight = norm.get_parameter("weight")
        return weight * (wide * (total / over + eps).rsqrt()).to(x.dtype)


def shared_states_of(layer: nn.Module, size: int, rank: int) -> SharedStates | None:
    """The part of Mamba 2 that ``rank`` computes, where it has fewer groups than there are ranks; else None."""
    if linear_attention_of(layer) is not LinearAttention.MAMBA_2:
        return None
    groups, heads, width, state = (
        _count(layer, name) for name in ("n_groups", "num_heads", "head_dim", "ssm_state_size")
    )
    return SharedStates(size, rank, groups, heads, width, state) if groups < size else None


def why_not_shared(layer: nn.Module, size: int) -> Iterator[str]:
    """Yield why ``size`` ranks cannot share ``layer``, which is Mamba 2."""
    groups, heads, state = (_count(layer, name) for name in COUNTED)
    if groups >= size:
        return
    if size % groups or heads % size or groups * state % size:
        yield f"they cannot share {groups} groups of {heads} heads and states of {state} evenly"
    norm = layer.get_submodule("norm")
    if own_shapes(norm) and any(attribute(norm, name, object) is None for name in GROUPED):
        yield f"they cannot share its norm ({type(norm).__name__}), which is over groups"


def _count(layer: nn.Module, name: str) -> int:
    found = attribute(layer, name, int)
    assert found is not None, f"transformers' {type(layer).__name__} has {name}"
    return found
