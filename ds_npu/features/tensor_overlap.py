"""``ds_npu.tensor_overlap``: tensor-parallel communication while the matrix multiplication runs."""

from __future__ import annotations

import importlib
from typing import Any, Literal

from ds_npu.features.feature import Build, Feature, Slot

TensorOverlap = Literal["none", "pipelined", "fused"]


def _unmet(overlap: TensorOverlap) -> list[str]:
    if overlap != "fused":
        return []
    lack = importlib.import_module("ds_npu.ops.matmul_collective").lack()
    return [f"its kernels are not available: {lack}"] if lack else []


def _apply(overlap: TensorOverlap, build: Build) -> None:
    if overlap == "none":
        return
    ways: Any = importlib.import_module("ds_npu.overlap.tensor_matmul")
    group = build.topology.group("tp")
    pipelined = ways.Pipelined(group)
    build.fill(Slot.LINEAR, ways.Fused(group, pipelined) if overlap == "fused" else pipelined, by="tensor_overlap")


TENSOR_OVERLAP: Feature[TensorOverlap] = Feature("tensor_overlap", unmet=_unmet, apply=_apply)
