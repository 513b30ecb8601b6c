"""``ds_npu.tensor_overlap``: tensor-parallel collectives overlap with matrix multiplications."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from ds_npu.config.sections import TensorOverlap
from ds_npu.features.build import Build
from ds_npu.features.declaration import Change
from ds_npu.features.feature import Feature
from ds_npu.ops import matmul_collective
from ds_npu.parallel.tensor.overlapped_matmul import Fused, Pipelined


def _unmet(overlap: TensorOverlap) -> list[str]:
    if overlap != "fused":
        return []
    reason = matmul_collective.why_unavailable()
    return [f"its kernels are not available: {reason}"] if reason else []


def _asked(overlap: TensorOverlap, build: Build) -> str:
    return "" if overlap == "none" else overlap


def _parts(overlap: TensorOverlap, build: Build) -> Iterable[Change]:
    if overlap != "none":
        group = build.topology.group("tp")
        pipelined = Pipelined(group)
        collectives = Fused(group, pipelined) if overlap == "fused" else pipelined
        make = partial(setattr, build, "collectives", collectives)
        yield Change("provides", "products with collectives of sequence parallelism", overlap, make)


TENSOR_OVERLAP: Feature[TensorOverlap] = Feature("tensor_overlap", parts=_parts, asked=_asked, unmet=_unmet)
