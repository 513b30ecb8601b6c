"""The operators: each computes on tensors alone, in one NPU kernel where there is one and in PyTorch elsewhere."""

from __future__ import annotations

from ds_npu.ops.adamw import adamw_
from ds_npu.ops.attention import CAUSAL, FULL, Mask, Options, attention, sliding
from ds_npu.ops.cross_entropy import cross_entropy
from ds_npu.ops.matmul_accumulate import matmul_accumulate_
from ds_npu.ops.rms_norm import add_rms_norm, rms_norm
from ds_npu.ops.rotary import rotary
from ds_npu.ops.softmax import softmax
from ds_npu.ops.swiglu import swiglu

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
