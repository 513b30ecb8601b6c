"""Attention that returns (out, lse), with masks as data: the reference, or one NPU kernel (flash attention)."""

from __future__ import annotations

from ds_npu.ops.attention.document import Inputs
from ds_npu.ops.attention.mask import CAUSAL, FULL, Mask, sliding
from ds_npu.ops.attention.operator import attention, attention_backward, attention_forward
from ds_npu.ops.attention.options import Layout, Options, kernel_refusal
from ds_npu.ops.attention.reference import Dropout, Result

__all__ = [
    "CAUSAL",
    "FULL",
    "Dropout",
    "Inputs",
    "Layout",
    "Mask",
    "Options",
    "Result",
    "attention",
    "attention_backward",
    "attention_forward",
    "kernel_refusal",
    "sliding",
]
