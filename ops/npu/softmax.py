"""The masked softmax with torch_npu."""

from __future__ import annotations

import torch
import torch_npu

from ds_npu.ops import softmax as operator


def softmax(x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
    """``ds_npu.ops.softmax``, one kernel forward and one backward where S and T are 32, 64, 96 … 4096.

    The kernel replaces masked scores by -10000, so a score below that is no smaller than a masked one. Without a
    mask, and with other sizes, the reference is used (npu_scaled_masked_softmax in torch_npu 2.13, _op_plugin_docs.py).
    """
    if mask is None or not _fits(x, mask):
        return operator.reference(x, mask, scale)
    y: torch.Tensor = torch_npu.npu_scaled_masked_softmax(x, mask, scale, False)
    return y


def _fits(x: torch.Tensor, mask: torch.Tensor) -> bool:
    is_aligned = all(32 <= size <= 4096 and size % 32 == 0 for size in x.shape[2:])
    return is_aligned and x.dim() == mask.dim() == 4 and mask.shape[2:] == x.shape[2:]
