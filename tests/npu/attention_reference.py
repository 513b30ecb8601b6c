"""Attention in float64 on the CPU, from CANN's description of it: what the NPU's is compared with."""

from dataclasses import dataclass

import torch

LOWEST = torch.finfo(torch.float32).min
LARGEST = torch.finfo(torch.float32).max
FLOAT32_STEPS = 8
"""Half units in the last place allowed for the few float32 operations in a row that make a score, weight or sum."""


def hidden_by_window(rows: int, keys: int, lower: int | None, upper: int | None, prefix: int = 0) -> torch.Tensor:
    """True where row i does not see key j: outside i + lower .. i + upper (None: no bound), and not in the prefix."""
    i, j = torch.arange(rows)[:, None], torch.arange(keys)[None, :]
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    if lower is not None:
        hidden |= j < i + lower
    if upper is not None:
        hidden |= j > i + upper
    return hidden & (j >= prefix)


def hidden_in_mode(mode: int, rows: int, keys: int, pre: int = 0, post: int = 0, prefix: int = 0) -> torch.Tensor:
    """What sparse mode ``mode`` hides: 0 and 1 count from the upper left corner, 3 to 6 from the lower right."""
    corner = keys - rows
    if mode == 0:
        return hidden_by_window(rows, keys, -pre, post)
    if mode == 2:
        return hidden_by_window(rows, keys, None, 0)
    if mode == 3:
        return hidden_by_window(rows, keys, None, corner)
    if mode == 4:
        return hidden_by_window(rows, keys, corner - pre, corner + post)
    assert mode in (5, 6), mode
    return hidden_by_window(rows, keys, None, corner, prefix)


def compressed_mask(rows: int = 2048) -> torch.Tensor:
    mask = torch.ones(rows, 2048, dtype=torch.bool).triu(1)
    if rows > 2048:
        mask[2048:, :1024] = False
        mask[2048:, 1024:] = True
    return mask


@dataclass
class Attention:
    """Results in float64 and, for each, the magnitude of what was rounded on the way, in units of dtype's rounding."""

    out: torch.Tensor
    max: torch.Tensor
    sum: torch.Tensor
    gradients: dict[str, torch.Tensor]
    magnitudes: dict[str, torch.Tensor]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out_gradient: torch.Tensor,
    hidden: torch.Tensor,
    *,
    scale: float,
    dtype: torch.dtype,
    pse: torch.Tensor | None = None,
    pse_type: int = 1,
    sink: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    keep_prob: float = 1.0,
    hidden_row_weights: str = "zero",
) -> Attention:
    """All tensors [batch, heads, rows, size] in float64, ``hidden`` and ``kept`` broadcastable to the scores."""
    group = query.shape[1] // key.shape[1]
    inputs = {"query": query, "key": key, "value": value, "pse": pse, "sink": sink}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items() if tensor is not None}
    q, k, v = leaves["query"], leaves["key"].repeat_interleave(group, 1), leaves["value"].repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * scale
    if pse is not None:
        scores = scores + leaves["pse"] * (scale if pse_type == 1 else 1.0)
    # CANN's backward pass does not know that a hidden score is a constant; that shows only where its weight is not 0.
    scores = scores + (scores.masked_fill(hidden, LOWEST) - scores).detach()
    logits = scores
    if sink is not None:
        logits = torch.cat([scores, leaves["sink"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=3)
    weights = logits.softmax(3)[..., : scores.shape[3]]
    maximum = logits.amax(3).detach()
    total = (logits - maximum[..., None]).exp().sum(3).detach()
    if hidden_row_weights == "zero" and sink is None:
        empty = hidden.expand_as(scores).all(3)
        weights = weights.masked_fill(empty[..., None], 0)
        total = total.masked_fill(empty, LARGEST)
    dropped = weights if kept is None else weights * kept / keep_prob
    out = dropped @ v
    gradients = torch.autograd.grad(out, list(leaves.values()), out_gradient)
    terms = (q.abs() @ k.abs().transpose(2, 3)).detach() * scale
    if pse is not None:
        terms = terms + pse.abs() * (scale if pse_type == 1 else 1.0)
    named = dict(zip(leaves, gradients, strict=True))
    magnitudes = _magnitudes(
        (q, k, v, out, out_gradient),
        weights,
        dropped,
        terms,
        named,
        scale=scale,
        dtype=dtype,
        kept=None if kept is None else kept / keep_prob,
        pse_scale=scale if pse_type == 1 else 1.0,
    )
    return Attention(out.detach(), maximum, total, named, magnitudes)


def _magnitudes(tensors, weights, dropped, terms, gradients, *, scale, dtype, kept, pse_scale):
    """A result is rounded once to dtype: its own size. What it is summed from was computed in float32: the sum of the
    absolute terms, times how far a score's rounding moves a weight. The backward pass begins with the rounded ``out``,
    whose product with the gradient is subtracted in every term."""
    q, k, v, out, out_gradient = tensors
    group = q.shape[1] // gradients["key"].shape[1]
    with torch.no_grad():
        float32 = FLOAT32_STEPS * torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
        sensitivity = 1 + 2 * terms.amax() if terms.numel() else torch.tensor(1.0)
        p, dropped, upstream = weights.abs(), dropped.abs(), out_gradient.abs()

        def by_key_head(tensor):
            return tensor.unflatten(1, (-1, group)).sum(2)

        slopes = upstream @ v.abs().transpose(2, 3)
        if kept is not None:
            slopes = slopes * kept
        mean = (out.abs() * upstream).sum(3, keepdim=True)
        rounded = p * mean
        computed = float32 * sensitivity * p * (slopes + mean)
        inner = rounded + computed
        result = {
            "out": out.abs() + float32 * sensitivity * (dropped @ v.abs()),
            "max": FLOAT32_STEPS * terms.amax(3) if terms.numel() else terms.sum(3),
            "sum": FLOAT32_STEPS * sensitivity * weights.shape[3],
            "query": gradients["query"].abs() + scale * (inner @ k.abs()),
            "key": gradients["key"].abs() + scale * by_key_head(inner.transpose(2, 3) @ q.abs()),
            "value": gradients["value"].abs() + float32 * sensitivity * by_key_head(dropped.transpose(2, 3) @ upstream),
        }
        if "pse" in gradients:
            result["pse"] = gradients["pse"].abs() + pse_scale * inner.sum_to_size(gradients["pse"].shape)
        if "sink" in gradients:
            # in float32, from the rounded out: its rounding counts in units of dtype, not of the sink's float32
            unit = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
            result["sink"] = unit * (mean.sum((0, 2, 3)) * (1 + float32 * sensitivity)) + gradients["sink"].abs()
        return result
