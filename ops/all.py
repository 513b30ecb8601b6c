"""Every operator, and whether its NPU kernel is used."""

from __future__ import annotations

from typing import Any

from ds_npu.ops.adamw import adamw_
from ds_npu.ops.attention import attention_backward, attention_forward
from ds_npu.ops.grouped_matmul import grouped_matmul, grouped_outer, grouped_outer_accumulate_
from ds_npu.ops.layers import add_rms_norm, cross_entropy, rms_norm, rotary, softmax, swiglu
from ds_npu.ops.matmul_accumulate import matmul_accumulate_
from ds_npu.ops.operator import Operator
from ds_npu.ops.token_permutation import token_permute, token_unpermute

OPERATORS: tuple[Operator[..., Any], ...] = (
    rms_norm,
    add_rms_norm,
    swiglu,
    rotary,
    softmax,
    cross_entropy,
    matmul_accumulate_,
    adamw_,
    attention_forward,
    attention_backward,
    grouped_matmul,
    grouped_outer,
    grouped_outer_accumulate_,
    token_permute,
    token_unpermute,
)


def report() -> list[tuple[str, str]]:
    """(name, why its NPU kernel is not used) of each operator; the reason is empty where the kernel is used."""
    return [(operator.name, str(operator.why_unavailable() or "")) for operator in OPERATORS]
