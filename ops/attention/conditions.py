"""Calls that the NPU's attention kernel cannot do; the reference does them."""

from __future__ import annotations

import torch

from ds_npu.ops.attention.options import Options, Sizes, sizes_of

WIDEST_HEAD = 768
MOST_HEADS = 256
LONGEST = 1 << 20


def kernel_refusal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> str | None:
    """Why the kernel cannot do a call with these shapes and options, None if it can.

    Source: the constraints of aclnnFlashAttentionScoreV2 in CANN 8.5's documentation, and MindSpeed's of packed
    documents. No values are read: for a row that a ``dense`` mask leaves without a key the kernel gives 0.
    """
    sizes = sizes_of(q, k, v, options)
    if 0 in sizes:
        return "an empty tensor"
    if max(sizes.width, sizes.value_width) > WIDEST_HEAD:
        return f"heads of width {max(sizes.width, sizes.value_width)}, the kernel's are {WIDEST_HEAD} at most"
    if sizes.value_width > sizes.width:
        return f"values of width {sizes.value_width}, wider than the keys, which have {sizes.width}"
    if sizes.heads > MOST_HEADS:
        return f"{sizes.heads} heads, the kernel does {MOST_HEADS} at most"
    if options.mask.ends_q:
        return _packed_refusal(options, sizes)
    if max(sizes.rows, sizes.keys) > LONGEST:
        return f"{max(sizes.rows, sizes.keys)} rows or keys, the kernel does {LONGEST} at most"
    return None


def _packed_refusal(options: Options, sizes: Sizes) -> str | None:
    mask, moved = options.mask, False
    for rows, keys in mask.documents(sizes.rows, sizes.keys):
        if len(rows) == 0 and len(keys) == 0:
            continue
        if len(rows) == 0 or mask.band(len(rows), len(keys)).leaves_a_row_empty(len(rows), len(keys)):
            return f"a packed document of {len(rows)} rows and {len(keys)} keys, of which a row sees none"
        moved = moved or len(rows) != len(keys)
    if moved and mask.from_start and (mask.before is not None or mask.after != 0):
        return "a band that begins at the first row and key of packed documents with more keys than rows, or fewer"
    return None
