"""Attention by its formula, with whole score matrices, in the dtype of its inputs: what tests compare with."""

from itertools import pairwise

import torch


def hidden_by_band(rows, keys, before=None, after=None, from_start=False):
    """[rows, keys], True where a row does not see a key; the band counts from the last row and key, or the first."""
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    for i in range(rows):
        centre = i if from_start else i + keys - rows
        for j in range(keys):
            hidden[i, j] = (before is not None and j < centre - before) or (after is not None and j > centre + after)
    return hidden


def hidden_by_documents(ends_q, ends_k, **band):
    """[T, T]: documents do not see each other, and the band counts in each."""
    hidden = torch.ones(ends_q[-1], ends_k[-1], dtype=torch.bool)
    for (q0, q1), (k0, k1) in zip(pairwise((0, *ends_q)), pairwise((0, *ends_k)), strict=True):
        hidden[q0:q1, k0:k1] = hidden_by_band(q1 - q0, k1 - k0, **band)
    return hidden


def attention_formula(q, k, v, hidden, scale, kept=None, *, keep_prob=1.0):
    """q [B, N, S, D], k and v with fewer heads: out [B, N, S, D] and lse [B, N, S]. A row without keys: 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("bnid,bnjd->bnij", q, k) * scale
    empty = hidden.expand_as(scores).all(-1, keepdim=True)
    scores = scores.masked_fill(hidden & ~empty, -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(empty, 0)
    dropped = weights if kept is None else weights * kept / keep_prob
    lse = torch.logsumexp(scores, -1).masked_fill(empty[..., 0], -torch.inf)
    return torch.einsum("bnij,bnjd->bnid", dropped, v), lse
