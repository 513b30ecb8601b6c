"""Attention in plain PyTorch: its layouts, its packed documents and its dropout around ``document``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ds_npu.ops.attention import document
from ds_npu.ops.attention.document import Inputs, Upstream, Weighting
from ds_npu.ops.attention.options import Layout, Options, Sizes, by_head, laid_out, sizes_of


class Dropout(NamedTuple):
    """Numbers that reproduce the dropout of a call: ``seed`` in the reference, the first three in the NPU's kernel."""

    seed: int
    offset: int = 0
    numels: int = 0
    of_kernel: bool = False


class Result(NamedTuple):
    """``lse``: log of the sum of the exponentials of a row's scores, [B, N, S] (TND: [T, N]), in float32, or float64
    for float64; -inf for a row that sees no key, whose ``out`` is 0. ``dropout`` is None without dropout."""

    out: torch.Tensor
    lse: torch.Tensor
    dropout: Dropout | None = None


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Result:
    """softmax(mask(q kᵀ · scale)) v, with dropout of the weights; shapes and errors: ``ds_npu.ops.attention``."""
    sizes = sizes_of(q, k, v, options)
    dropout = None
    if options.dropout_p > 0:
        # The device's own generator draws the seed, so that its state alone decides what is dropped; the host reads it.
        dropout = Dropout(int(torch.randint(2**62, (), device=q.device).item()))
    weighting = _weighting(options, sizes, dropout, q.device)
    inputs = views(Inputs(q, k, v), options.layout, sizes)
    documents = options.mask.documents(sizes.rows, sizes.keys)
    found = [document.forward(_part(inputs, rows, keys), weighting) for rows, keys in documents]
    out, lse = (_joined(one) for one in zip(*found, strict=True))
    return Result(laid_out(out, options.layout), lse[0].T if options.layout == "TND" else lse, dropout)


def backward(
    dout: torch.Tensor, inputs: Inputs, result: Result, options: Options, dlse: torch.Tensor | None = None
) -> Inputs:
    """The gradients of ``inputs`` from those of out and of lse (None: it has none).

    ``result`` may be of attention to more keys than ``inputs`` holds, merged: its lse says what the weights are.
    Raises RuntimeError for a dropout pattern of the NPU's kernel.
    """
    if result.dropout and result.dropout.of_kernel:
        raise RuntimeError("attention: the dropout pattern is the NPU kernel's, and its backward pass cannot be used")
    sizes = sizes_of(*inputs, options)
    layout = options.layout
    weighting = _weighting(options, sizes, result.dropout, dout.device)
    inputs = views(inputs, layout, sizes)
    dout, out = (by_head(x, layout, sizes.heads) for x in (dout, result.out))
    lse = result.lse
    if layout == "TND":
        lse = lse.T[None]
        dlse = None if dlse is None else dlse.T[None]
    found = []
    for rows, keys in options.mask.documents(sizes.rows, sizes.keys):
        of_rows = Upstream(_of(dout, rows), None if dlse is None else _of(dlse, rows), _of(out, rows), _of(lse, rows))
        found.append(document.backward(_part(inputs, rows, keys), of_rows, weighting))
    return Inputs(*(laid_out(_joined(one), layout) for one in zip(*found, strict=True)))


def views(inputs: Inputs, layout: Layout, sizes: Sizes) -> Inputs:
    """Query, key and value as views [B, N, S, D]."""
    heads = (sizes.heads, sizes.key_heads, sizes.key_heads)
    return Inputs(*(by_head(x, layout, n) for x, n in zip(inputs, heads, strict=True)))


def _weighting(options: Options, sizes: Sizes, dropout: Dropout | None, device: torch.device) -> Weighting:
    pattern = torch.Generator(device).manual_seed(dropout.seed) if dropout else None
    return Weighting(options.mask, options.scale_of(sizes), options.dropout_p, pattern, options.softcap)


def _of(x: torch.Tensor, part: range) -> torch.Tensor:
    return x if len(part) == x.shape[2] else x[:, :, part.start : part.stop]


def _part(inputs: Inputs, rows: range, keys: range) -> Inputs:
    return Inputs(_of(inputs.q, rows), _of(inputs.k, keys), _of(inputs.v, keys))


def _joined(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
