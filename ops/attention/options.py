"""The options of an attention call, its sizes, and the calls that the NPU's kernel cannot do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from ds_npu.ops.attention.mask import FULL, Mask

Layout = Literal["BNSD", "BSND", "SBH", "TND"]


class Sizes(NamedTuple):
    """B, Sq, Sk, heads of the query, of key and value, widths of query and key, of the value (for TND: B 1, S is T)."""

    batch: int
    rows: int
    keys: int
    heads: int
    key_heads: int
    width: int
    value_width: int


@dataclass(frozen=True, eq=False)
class Options:
    """``scale`` None is 1/sqrt(D). ``heads`` is the query's number of heads, which only layout SBH does not show.

    Raises ValueError for an unknown layout, and where ``mask``, ``dropout_p`` or ``heads`` do not go with it.
    """

    layout: Layout = "BSND"
    mask: Mask = FULL
    scale: float | None = None
    dropout_p: float = 0.0
    heads: int = 0
    softcap: float | None = None
    """The scores are softcap * tanh(scores / softcap) before the mask; None: they are not changed (Gemma 2)."""
    sinks: torch.Tensor | None = None
    """[N]: scores of one more key for each head, whose value is 0 (GPT-OSS). The functions with autograd merge them."""

    def __post_init__(self) -> None:
        if self.layout not in get_args(Layout):
            raise ValueError(f"layout {self.layout!r}: attention knows {', '.join(get_args(Layout))}")
        if not 0 <= self.dropout_p < 1:
            raise ValueError(f"dropout_p is {self.dropout_p}: from 0 to below 1")
        if bool(self.mask.ends_q) != (self.layout == "TND"):
            raise ValueError(
                f"layout {self.layout} with {len(self.mask.ends_q)} documents: TND, and only TND, has some"
            )
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap is {self.softcap}: above 0")
        if (self.heads > 0) != (self.layout == "SBH"):
            raise ValueError(f"layout {self.layout} with heads={self.heads}: SBH, and only SBH, needs it")

    def scale_of(self, sizes: Sizes) -> float:
        """The factor of the scores."""
        return float(sizes.width**-0.5) if self.scale is None else self.scale


def by_head(x: torch.Tensor, layout: Layout, heads: int) -> torch.Tensor:
    """A view [B, N, S, D] of ``x``, which is laid out as ``layout`` (TND: [1, N, T, D]; ``heads`` is for SBH)."""
    match layout:
        case "BNSD":
            return x
        case "BSND":
            return x.transpose(1, 2)
        case "SBH":
            return torch.unflatten(x, -1, (heads, -1)).permute(1, 2, 0, 3)
        case "TND":
            return x.transpose(0, 1)[None]


def laid_out(x_BNSD: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The inverse of ``by_head``."""
    match layout:
        case "BNSD":
            return x_BNSD
        case "BSND":
            return x_BNSD.transpose(1, 2)
        case "SBH":
            return x_BNSD.permute(2, 0, 1, 3).flatten(2)
        case "TND":
            return x_BNSD[0].transpose(0, 1)


def sizes_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Sizes:
    """The sizes of a call. Raises ValueError, with the shapes, for tensors that do not go together."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} in layout {options.layout}"
    if {q.dim(), k.dim(), v.dim()} != {3 if options.layout in ("SBH", "TND") else 4}:
        raise ValueError(f"attention: {shapes}: wrong number of dims")
    if options.layout == "SBH":
        width, rest = divmod(q.shape[2], options.heads)
        key_heads, key_rest = divmod(k.shape[2], max(width, 1))
        if rest or key_rest or key_heads == 0 or v.shape[2] % key_heads:
            raise ValueError(f"attention: {shapes}: cannot be split into {options.heads} heads of the query")
    else:
        key_heads = k.shape[1 if options.layout in ("BNSD", "TND") else 2]
    q, k, v = (by_head(x, options.layout, n) for x, n in ((q, options.heads), (k, key_heads), (v, key_heads)))
    heads = q.shape[1]
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"attention: {shapes}: batch, keys and widths must agree")
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"attention: {shapes}: {heads} heads of the query cannot share {key_heads} of the key")
    sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], heads, key_heads, q.shape[3], v.shape[3])
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention: {shapes}: one dtype is needed, not {q.dtype}, {k.dtype} and {v.dtype}")
    mask = options.mask
    scores = (sizes.batch, heads, sizes.rows, sizes.keys)
    if mask.dense is not None and any(
        given not in (1, wanted) for given, wanted in zip(mask.dense.shape[::-1], scores[::-1], strict=False)
    ):
        raise ValueError(f"attention: {shapes}: a mask {list(mask.dense.shape)} does not fit scores {list(scores)}")
    if mask.ends_q and (mask.ends_q[-1], mask.ends_k[-1]) != (sizes.rows, sizes.keys):
        raise ValueError(f"attention: {shapes}: the documents end at {mask.ends_q[-1]} and {mask.ends_k[-1]}")
    return sizes


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
    if options.softcap is not None:
        return "a soft cap of the scores"
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
