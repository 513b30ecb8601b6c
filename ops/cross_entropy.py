"""Cross-entropy of logits: one loss for each token."""

from __future__ import annotations

import torch
from torch.nn import functional

from ds_npu.operator_costs import cross_entropy_cost
from ds_npu.ops.operator import Operator
from ds_npu.ops.precision import for_accumulation


def reference(logits_TV: torch.Tensor, targets_T: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """log(sum_v exp(logits[t, v])) - logits[t, targets[t]] for each token t; 0 where the target is ``ignore_index``.

    logits: [T, V]; targets: [T], int64; the losses: [T], in float32 (float64 for float64), for the caller to reduce.
    """
    return functional.cross_entropy(for_accumulation(logits_TV), targets_T, ignore_index=ignore_index, reduction="none")


def sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    logits_TV = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    return logits_TV.requires_grad_(), torch.tensor([3, -100, 39, 0, -100, 17])


cross_entropy = Operator(
    "cross_entropy",
    reference,
    kernel="ds_npu.ops.npu.layers:cross_entropy",
    needs=("npu_cross_entropy_loss",),
    sample=sample,
    cost=cross_entropy_cost,
)
