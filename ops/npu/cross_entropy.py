"""Cross-entropy with torch_npu."""

from __future__ import annotations

import torch
import torch_npu

from ds_npu.ops import cross_entropy as operator

LARGEST_T = 200_000
"""Most tokens, by the documentation of npu_cross_entropy_loss in torch_npu 2.13 (_op_plugin_docs.py)."""


def cross_entropy(logits_TV: torch.Tensor, targets_T: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """``ds_npu.ops.cross_entropy``, one kernel forward and one backward (aclnnCrossEntropyLoss and -Grad).

    The kernel rounds the losses and all log-probabilities, from which it makes the gradient, to the dtype of its input,
    so it gets float32. It takes a negative ``ignore_index`` for none at all, so ignored tokens get a target here.
    """
    if not 0 < logits_TV.shape[0] <= LARGEST_T:
        return operator.reference(logits_TV, targets_T, ignore_index)
    ignored_T = targets_T == ignore_index
    losses_T: torch.Tensor = torch_npu.npu_cross_entropy_loss(
        logits_TV.float(), targets_T.masked_fill(ignored_T, 0), reduction="none"
    )[0]
    return losses_T.masked_fill(ignored_T, 0.0)
