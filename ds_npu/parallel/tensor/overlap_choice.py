"""Chooses for each matrix product of sequence parallelism how it overlaps with its collective.

The choice is made of numbers that all tensor ranks have in common: ranks may hold shards of different sizes, and would
wait for each other for ever if one sent pieces and another the whole.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from ds_npu.log import warn_once
from ds_npu.ops import matmul_collective
from ds_npu.parallel.tensor.axis import MatmulCollectives, Operands, Pair, SerialCollectives
from ds_npu.parallel.tensor.overlap_cost import FUSED, SERIAL, OverlapCall, fastest_way, seconds_by_way
from ds_npu.parallel.tensor.overlapped_matmul import Fused, Pipelined
from ds_npu.parallel.tensor.product import Multiplier, WeightLayout
from ds_npu.topology.machine import Machine

Asked = Literal["pipelined", "fused"]
_NAMES = {"all_gather": "an all-gather with a product", "reduce_scatter": "a product with a reduce-scatter"}


@dataclass(frozen=True)
class OverlapChoice:
    """Chooses how the products of one tensor axis overlap with their collectives.

    ``asked`` "pipelined": in pieces, where a shard has two tokens. "fused": in one kernel, where it takes the operands,
    and in pieces elsewhere; serial where the collective hides behind weight gradients anyway. None: the fastest way by
    the estimates, which may be the serial one.
    """

    group: dist.ProcessGroup
    machine: Machine
    asked: Asked | None = None
    has_kernels: bool = True
    """Whether the machine has the fused kernels."""

    def of_gather(
        self, x_BsK: torch.Tensor, matrices: Operands, layouts: Sequence[WeightLayout], gathered: bool
    ) -> MatmulCollectives:
        """How ``x_BsK`` is gathered and multiplied by ``matrices``, whose weights have ``layouts``."""
        batch, rows, inner = x_BsK.shape
        products = tuple((inner, layout.most) for layout in layouts)
        call = OverlapCall("all_gather", self._ranks, batch, rows, products, x_BsK.itemsize, gathered)
        return self._way(call, self._unmet(x_BsK, matrices, (inner,)))

    def of_scatter(self, pairs: Sequence[Pair], layouts: Sequence[WeightLayout], hides: bool) -> MatmulCollectives:
        """How the sum of the products of ``pairs`` is scattered; ``hides`` as in OverlapCall."""
        x, matrix = pairs[0]
        products = tuple((layout.most, matrix.shape[1]) for layout in layouts)
        sizes = self._ranks, x.shape[0], x.shape[1] // self._ranks
        call = OverlapCall("reduce_scatter", *sizes, products, x.itemsize, hides=hides)
        if len(pairs) > 1:
            return self._way(call, f"a sum of {len(pairs)} products is scattered; the kernel has one")
        return self._way(call, self._unmet(x, [matrix], layouts[0].shards))

    def _way(self, call: OverlapCall, unmet: str | None) -> MatmulCollectives:
        # A layer may not say how large the other ranks' shards are. What hides behind weight gradients needs no kernel,
        # which would use the communicator while x is gathered with it.
        if not all(itertools.chain(*call.products)) or (self.asked == "fused" and call.hides):
            return self._made(SERIAL)
        if self.asked == "fused" and unmet is None:
            return self._made(FUSED)
        if self.asked == "fused":
            warn_once(f"tensor_overlap: {_NAMES[call.collective]} is pipelined, not fused: {unmet}")
        ways = _seconds(call, self.machine, self.asked is None and unmet is None)
        if self.asked is not None:
            ways = {way: seconds for way, seconds in ways.items() if way != SERIAL} or ways
        return self._made(fastest_way(ways))

    def _unmet(self, x: torch.Tensor, matrices: Operands, inner: Sequence[int]) -> str | None:
        """Why no kernel takes these operands, of ``inner`` dimensions on the tensor ranks; None if one does."""
        if any(isinstance(matrix, Multiplier) for matrix in matrices):
            return "the layer has a kind of product that the kernel does not compute"
        if not self.has_kernels:
            return "this machine has no such kernel"
        dtypes = x.dtype, matrices[0].dtype
        found = (matmul_collective.unmet(x.device.type, dtypes, each, self._ranks) for each in inner)
        return next(filter(None, found), None)

    @functools.cached_property
    def _ranks(self) -> int:
        return dist.get_world_size(self.group)

    def _made(self, way: int) -> MatmulCollectives:
        if way not in self._ways:
            self._ways[way] = Pipelined(self.group, way)
        return self._ways[way]

    @functools.cached_property
    def _ways(self) -> dict[int, MatmulCollectives]:
        return {SERIAL: SerialCollectives(self.group), FUSED: Fused(self.group)}


@functools.lru_cache(maxsize=4096)
def _seconds(call: OverlapCall, machine: Machine, has_fused: bool) -> Mapping[int, float]:
    return seconds_by_way(call, machine, has_fused)
