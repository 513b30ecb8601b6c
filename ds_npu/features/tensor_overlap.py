"""``ds_npu.tensor_overlap``: tensor-parallel communication while the matrix multiplication runs."""

from __future__ import annotations

from typing import Literal

from ds_npu.features.feature import Feature

TensorOverlap = Literal["none", "pipelined", "fused"]

TENSOR_OVERLAP: Feature[TensorOverlap] = Feature("tensor_overlap", planned=("tensor_overlap",))
