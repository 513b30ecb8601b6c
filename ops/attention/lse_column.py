"""The gradient of lse as one more column of the tensors, for a backward kernel that takes only the gradient of out."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ds_npu.ops.attention.document import Inputs
from ds_npu.ops.attention.options import Layout, Options, by_head, laid_out, sizes_of
from ds_npu.ops.attention.reference import Result, views

ALIGNED = 16
"""Number of columns that are added, of which one is used: widths of heads remain multiples of it."""


class Widened(NamedTuple):
    """The arguments of a backward call whose gradients, once ``narrowed``, include the part that comes from lse."""

    dout: torch.Tensor
    inputs: Inputs
    result: Result
    options: Options


def _layout(options: Options) -> Layout:
    # A layout in which the columns of a head are the last dim.
    return "TND" if options.layout == "TND" else "BNSD"


def widened(dout: torch.Tensor, inputs: Inputs, result: Result, options: Options, dlse: torch.Tensor) -> Widened:
    """The backward call with ``dlse`` in a further column.

    The gradient of a score is weight · (dout · v - sum(dout · out) + dlse): a column that is dlse in dout, 1 in v and
    0 in out adds dlse. It is rounded to dout's dtype.
    """
    sizes = sizes_of(*inputs, options)
    layout = _layout(options)
    q, k, v = views(inputs, options.layout, sizes)
    dout, out = (by_head(x, options.layout, sizes.heads) for x in (dout, result.out))
    dlse_BNS = dlse.T[None] if layout == "TND" else dlse
    value_width = sizes.value_width + ALIGNED
    width = max(sizes.width, value_width)
    v = pad(pad(v, (0, 1), value=1.0), (0, ALIGNED - 1))
    dout = pad(torch.cat([dout, dlse_BNS[..., None].to(dout.dtype)], -1), (0, ALIGNED - 1))
    q = pad(q, (0, width - q.shape[3]))
    k = pad(k, (0, width - k.shape[3]))
    out = pad(out, (0, ALIGNED))
    q, k, v, dout, out = (laid_out(x, layout) for x in (q, k, v, dout, out))
    as_before = replace(options, layout=layout, heads=0, scale=options.scale_of(sizes))
    return Widened(dout, Inputs(q, k, v), Result(out, result.lse), as_before)


def narrowed(gradients: Inputs, inputs: Inputs, options: Options) -> Inputs:
    """The gradients of ``inputs``, cut out of the ``gradients`` of the widened call."""
    sizes = sizes_of(*inputs, options)
    layout = _layout(options)
    widths = (sizes.width, sizes.width, sizes.value_width)
    heads_first = (by_head(x, layout, 0)[..., :n] for x, n in zip(gradients, widths, strict=True))
    return Inputs(*(laid_out(x, options.layout) for x in heads_first))
