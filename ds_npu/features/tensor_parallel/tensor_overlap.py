"""``ds_npu.tensor_overlap``: tensor-parallel collectives overlap with matrix multiplications."""

from __future__ import annotations

from ds_npu.config.tensor_overlap import TensorOverlap
from ds_npu.features.build import Build, Slot
from ds_npu.features.feature import Feature
from ds_npu.ops import matmul_collective
from ds_npu.parallel.tensor.overlapped_matmul import Fused, Pipelined


def _unmet(overlap: TensorOverlap) -> list[str]:
    if overlap != "fused":
        return []
    reason = matmul_collective.why_unavailable()
    return [f"its kernels are not available: {reason}"] if reason else []


def _apply(overlap: TensorOverlap, build: Build) -> None:
    if overlap == "none":
        return
    group = build.topology.group("tp")
    pipelined = Pipelined(group)
    build.fill(Slot.LINEAR, Fused(group, pipelined) if overlap == "fused" else pipelined, by="tensor_overlap")


TENSOR_OVERLAP: Feature[TensorOverlap] = Feature("tensor_overlap", unmet=_unmet, apply=_apply)
