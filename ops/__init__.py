"""The operators: each computes on tensors alone, in one NPU kernel where there is one and in PyTorch elsewhere."""

from __future__ import annotations

from ds_npu.ops.adamw import adamw_
from ds_npu.ops.attention import CAUSAL, FULL, Mask, Options, attention, sliding
from ds_npu.ops.layers import add_rms_norm, cross_entropy, rms_norm, rotary, softmax, swiglu
from ds_npu.ops.matmul_accumulate import matmul_accumulate_

__all__ = [
    "CAUSAL",
    "FULL",
    "Mask",
    "Options",
    "adamw_",
    "add_rms_norm",
    "attention",
    "cross_entropy",
    "matmul_accumulate_",
    "rms_norm",
    "rotary",
    "sliding",
    "softmax",
    "swiglu",
]
