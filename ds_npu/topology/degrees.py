"""How many ranks each axis of the grid has: arithmetic only, no process group and no torch.

One world grid, seen twice, the last axis fastest:

    dense:  (pp, dp, cp, tp)     every weight but the experts'
    expert: (pp, edp, ep, etp)   the experts'; edp * ep * etp == dp * cp * tp

``axis`` names an axis of the grid; ``dim`` is kept for tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Axis = Literal["pp", "dp", "cp", "tp", "edp", "ep", "etp"]

DENSE: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")
EXPERT: tuple[Axis, ...] = ("pp", "edp", "ep", "etp")
AXES: tuple[Axis, ...] = get_args(Axis)
NAMES: dict[Axis, str] = {
    "pp": "pipeline",
    "dp": "data",
    "cp": "context",
    "tp": "tensor",
    "edp": "expert data",
    "ep": "expert",
    "etp": "expert tensor",
}

Box = tuple[tuple[int, int], ...]
"""(distance between neighbours, number of ranks) along each axis of a group, the fastest first."""


@dataclass(frozen=True)
class Degrees:
    """Sizes of the axes of a world of ``pp * dp * cp * tp`` ranks.

    Raises ValueError where ``ep * etp`` does not divide ``dp * cp * tp``.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        if (self.dp * self.cp * self.tp) % (self.ep * self.etp):
            raise ValueError(
                f"ep * etp = {self.ep} * {self.etp} does not divide dp * cp * tp = {self.dp} * {self.cp} * {self.tp}"
            )

    @property
    def edp(self) -> int:
        """Copies of each expert within one pipeline stage."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def size(self, axis: Axis) -> int:
        return {
            "pp": self.pp,
            "dp": self.dp,
            "cp": self.cp,
            "tp": self.tp,
            "edp": self.edp,
            "ep": self.ep,
            "etp": self.etp,
        }[axis]

    def coordinates(self, global_rank: int) -> dict[Axis, int]:
        """The rank of ``global_rank`` along every axis of both views."""
        found: dict[Axis, int] = {}
        for view in (DENSE, EXPERT):
            rest = global_rank
            for axis in reversed(view):
                rest, found[axis] = divmod(rest, self.size(axis))
        return found

    def groups(self, *axes: Axis) -> list[list[int]]:
        """The groups of global ranks that differ only along ``axes`` (of one view), each in grid order.

        ``groups("dp", "cp")`` are the groups over which ZeRO shards.
        """
        view = DENSE if set(axes) <= set(DENSE) else EXPERT
        if not set(axes) <= set(view):
            raise ValueError(f"no view of the grid holds all of {axes}: the views are {DENSE} and {EXPERT}")
        found: dict[tuple[int, ...], list[int]] = {}
        for global_rank, ranks in enumerate(itertools.product(*(range(self.size(axis)) for axis in view))):
            fixed = tuple(rank for axis, rank in zip(view, ranks, strict=True) if axis not in axes)
            found.setdefault(fixed, []).append(global_rank)
        return list(found.values())

    def box(self, *axes: Axis) -> Box:
        """The layout of the global ranks of a group along ``axes`` (of one view), equal for groups of the same ranks.

        Axes of size 1 are left out, and axes next to each other are one.
        """
        found: list[tuple[int, int]] = []
        stride = 1
        for axis in reversed(DENSE if set(axes) <= set(DENSE) else EXPERT):
            size = self.size(axis)
            if axis in axes and size > 1:
                before = found.pop() if found and found[-1][0] * found[-1][1] == stride else (stride, 1)
                found.append((before[0], before[1] * size))
            stride *= size
        return tuple(found)


def box_of(ranks: Sequence[int]) -> Box:
    """The layout of ascending global ``ranks`` that are a group of some grid."""
    found: list[tuple[int, int]] = []
    rest = list(ranks)
    while len(rest) > 1:
        stride = rest[1] - rest[0]
        size = next((index for index in range(1, len(rest)) if rest[index] - rest[index - 1] != stride), len(rest))
        found.append((stride, size))
        rest = rest[::size]
    return tuple(found)


def box_ranks(box: Box, global_rank: int) -> tuple[int, ...]:
    """The ascending global ranks of the group with the layout ``box`` in which ``global_rank`` is."""
    first = global_rank - sum(global_rank // stride % size * stride for stride, size in box)
    steps = (range(0, stride * size, stride) for stride, size in reversed(box))
    return tuple(first + sum(each) for each in itertools.product(*steps))
