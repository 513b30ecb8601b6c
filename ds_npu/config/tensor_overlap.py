"""``ds_npu.tensor_overlap``: tensor-parallel communication while the matrix multiplication runs."""

from __future__ import annotations

from typing import Literal

TensorOverlap = Literal["none", "pipelined", "fused"]
