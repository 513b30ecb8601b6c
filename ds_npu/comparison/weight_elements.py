"""The elements of a weight of the plain model that a rank holds: ranges along dims, a window of their flat order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ds_npu.dump_hooks import Record, runs_of
from ds_npu.models.zero3 import unpartitioned_shape
from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.topology.topology import Topology


@dataclass(frozen=True)
class WeightElements:
    """The elements of a weight of ``shape`` that a tensor holds: a window of the part that the rank has."""

    shape: tuple[int, ...]
    dims: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """The rank's int64 indices along each dim that it holds in part, in the order in which it holds them."""
    first: int = 0
    """The index of the tensor's first element in the rank's part, which is taken flat."""

    @staticmethod
    def of(weight: nn.Parameter, topology: Topology, first: int = 0) -> WeightElements:
        """The elements of ``weight`` that this rank has, from the ``first`` one of its flat part on."""
        placement = placement_of(weight)
        shape = placement.shape or unpartitioned_shape(weight)
        dims: dict[int, torch.Tensor] = {}
        for axis, sharding in placement.sharded.items():
            index = dims.get(sharding.dim, torch.arange(shape[sharding.dim]))
            ranges = sharding.ranges[topology.rank(axis)]
            dims[sharding.dim] = torch.cat([index[:0], *(index[start:stop] for start, stop in ranges)])
        return WeightElements(tuple(shape), dims, first)

    @property
    def local(self) -> list[int]:
        """The shape of the rank's part."""
        return [len(self.dims[dim]) if dim in self.dims else size for dim, size in enumerate(self.shape)]

    def described(self, count: int) -> Record:
        """The entries that say so in the record of a tensor of ``count`` elements."""
        found: Record = {"shape": list(self.shape)}
        if self.dims:
            runs = {str(dim): runs_of(index) for dim, index in sorted(self.dims.items())}
            found["ranges"] = {dim: [[first, first + count] for first, count in each] for dim, each in runs.items()}
        return found if count == math.prod(self.local) else found | {"window": [self.first, count]}

    def indices(self, start: int, stop: int) -> torch.Tensor:
        """The flat indices, in the whole weight, of elements ``start`` to ``stop`` of the tensor: int64."""
        flat = torch.arange(self.first + start, self.first + stop)
        if not self.dims:
            return flat
        found = torch.zeros_like(flat)
        stride = 1
        local = self.local
        for dim in reversed(range(len(self.shape))):
            at = flat % local[dim]
            flat = flat // local[dim]
            found += (self.dims[dim][at] if dim in self.dims else at) * stride
            stride *= self.shape[dim]
        return found
