"""Linear attention with decay: the gated delta rule (Qwen3-Next) and the state space of Mamba 2, in chunks of products.

A head has a state of [K, V]. With ``beta`` a token decays the state and corrects what it holds at the token's key:

    S_t = exp(decay_t) S_{t-1},    S_t += k_t beta_t (v_t - S_t^T k_t)^T,    o_t = S_t^T q_t

and without it adds k_t v_t^T. So a run of tokens maps the state S before it to M S + N, where M ("transition") and N do
not depend on S: [K, K] and [K, V] with ``beta``; without it M is a number. Such maps are composed chunk by chunk.
Within a chunk all is products of matrices: the corrections of its tokens depend on each other by a unit lower
triangular matrix, which is inverted.

``segments`` number the documents of a sequence of several, in ascending order: a state ends with its document. All is
computed in float32 (float64 for float64), whatever the dtype of q, k and v.

Sources: Yang et al. 2024, Gated Delta Networks, arXiv 2412.06464, and Parallelizing Linear Transformers with the Delta
Rule, arXiv 2406.06484; Dao and Gu 2024, arXiv 2405.21060 (Mamba 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ds_npu.ops.autograd import Context, applied
from ds_npu.ops.precision import accumulation_dtype

CHUNK = 64
"""Tokens of a chunk: transformers' and flash-linear-attention's."""


class Recurrence(NamedTuple):
    """The tokens of B sequences as a recurrence sees them."""

    q: torch.Tensor
    """[B, S, H, K]."""
    k: torch.Tensor
    """[B, S, H, K]."""
    v: torch.Tensor
    """[B, S, H, V]."""
    decay: torch.Tensor
    """[B, S, H]: the logarithm of the decay, at most 0."""
    beta: torch.Tensor | None = None
    """[B, S, H]: how much of the state at its key a token overwrites; None: it adds to it."""


@dataclass(frozen=True)
class StateMap:
    """The map S -> M S + N of the state over a run of tokens.

    ``transition``: M, [..., K, K], or [..., 1, 1] where it is a number; ``added``: N, [..., K, V].
    """

    transition: torch.Tensor
    added: torch.Tensor

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        """The state behind the run, of ``state`` [..., K, V] before it."""
        return carried(self.transition, state) + self.added


def carried(transition: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """M S, for M a matrix or a number for each head."""
    return transition * state if transition.shape[-1] == 1 else transition @ state


@dataclass(frozen=True)
class Chunks:
    """All chunks of B sequences, each as a map of the state and of its tokens' outputs; n chunks of C tokens."""

    maps: StateMap
    """[B, n, H, ...]."""
    queries: torch.Tensor
    """[B, n, H, C, K]: they read the state before the chunk."""
    scores: torch.Tensor
    """[B, n, H, C, C]: weights of the chunk's values in its outputs."""
    values: torch.Tensor
    """[B, n, H, C, V]: what the tokens write if the state before the chunk is zero."""
    corrections: torch.Tensor | None
    """[B, n, H, C, K]: their product with the state before the chunk is subtracted from ``values``.

    None without ``beta``.
    """
    length: int

    def summary(self) -> StateMap:
        """The map of the state over the whole of each sequence: [B, H, ...]."""
        found: StateMap | None = None
        for one in self._each():
            found = one if found is None else StateMap(carried(one.transition, found.transition), one(found.added))
        assert found is not None, "a sequence has a token"
        return found

    def outputs(self, state_BHKV: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(o [B, S, H, V], the state behind each sequence [B, H, K, V]), from the state before it (None: zero)."""
        added = self.maps.added
        state = torch.zeros_like(added[:, 0]) if state_BHKV is None else state_BHKV
        before = []
        for one in self._each():
            before.append(state)
            state = one(state)
        states = torch.stack(before, 1)
        values = self.values if self.corrections is None else self.values - self.corrections @ states
        out = self.queries @ states + self.scores @ values
        return out.transpose(2, 3).flatten(1, 2)[:, : self.length], state

    def _each(self) -> Iterator[StateMap]:
        for transition, added in zip(self.maps.transition.unbind(1), self.maps.added.unbind(1), strict=True):
            yield StateMap(transition, added)


def linear_attention(
    tokens: Recurrence, segments_BS: torch.Tensor | None = None, state_BHKV: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, S, H, V] of v's dtype, the state behind the last token [B, H, K, V] in float32 or float64).

    ``state`` is the state before the first token, of that token's document (None: zero).
    """
    out, state = chunks_of(tokens, segments_BS).outputs(state_BHKV)
    return out.to(tokens.v.dtype), state


def chunks_of(tokens: Recurrence, segments_BS: torch.Tensor | None = None) -> Chunks:
    """The chunks of the sequences; the arguments are those of ``linear_attention``."""
    length = tokens.q.shape[1]
    dtype = accumulation_dtype(tokens.q.dtype)
    size = min(CHUNK, 1 << (length - 1).bit_length())
    missing = -length % size

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """[B, S, H, ...] as [B, n, H, C, ...]; added tokens are zero, which change no state."""
        padded = functional.pad(x.to(dtype), (*(0, 0) * (x.dim() - 2), 0, missing)) if missing else x.to(dtype)
        return torch.unflatten(padded, 1, (-1, size)).transpose(2, 3)

    q, k, v, decay = map(chunked, tokens[:4])
    total = decay.cumsum(-1)
    earlier = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    reaches_start = reaches_end = None
    if segments_BS is not None:
        numbers = torch.cat([segments_BS, segments_BS[:, -1:].expand(-1, missing)], 1)
        numbers = torch.unflatten(numbers, 1, (-1, size))
        before = torch.cat([numbers[:, :1, 0], numbers[:, :-1, -1]], 1)
        reaches_start = numbers == before[..., None]
        reaches_end = numbers == numbers[..., -1:]
        earlier = (earlier & (numbers[..., :, None] == numbers[..., None, :]))[:, :, None]
        reaches_start = reaches_start[:, :, None]
        reaches_end = reaches_end[:, :, None]
    decays = (total[..., :, None] - total[..., None, :]).masked_fill(~earlier, -torch.inf).exp()
    from_start = _exponential(total, reaches_start)
    to_end = _exponential(total[..., -1:] - total, reaches_end)
    through = from_start[..., -1, None, None]
    scores = (q @ k.mT) * decays
    keys = k * to_end[..., None]
    if tokens.beta is None:
        return Chunks(StateMap(through, keys.mT @ v), q * from_start[..., None], scores, v, None, length)
    beta = chunked(tokens.beta)[..., None]
    inverse = inverted((beta * k) @ k.mT * decays)
    values = inverse @ (beta * v)
    corrections = inverse @ (beta * from_start[..., None] * k)
    identity = torch.eye(k.shape[-1], dtype=dtype, device=k.device)
    maps = StateMap(through * identity - keys.mT @ corrections, keys.mT @ values)
    return Chunks(maps, q * from_start[..., None], scores, values, corrections, length)


def _exponential(x: torch.Tensor, where: torch.Tensor | None) -> torch.Tensor:
    """exp(x), 0 where ``where`` is False."""
    return (x if where is None else x.masked_fill(~where, -torch.inf)).exp()


class _InverseContext(Context):
    pass


class _Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _InverseContext, lower: torch.Tensor) -> torch.Tensor:
        inverse = _inverse_by_blocks(lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: _InverseContext, *grads: torch.Tensor) -> torch.Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grads[0] @ inverse.mT).tril(-1)


_inverse = applied(_Inverse, _Inverse.forward)


def inverted(lower: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1, where A is the part of ``lower`` [..., C, C] below its diagonal; C is a power of 2."""
    return _inverse(lower)


def _inverse_by_blocks(lower: torch.Tensor) -> torch.Tensor:
    """The inverses of the blocks on the diagonal, from two neighbours to one of twice the size.

    That is as accurate as substitution row by row, whose C steps would be as many kernels. Products of powers of A are
    not: the powers may be larger than the inverse by many orders of magnitude.
    """
    size = lower.shape[-1]
    blocks = torch.ones_like(lower[..., 0])[..., None, None]
    while (width := blocks.shape[-1]) < size:
        count = size // width // 2
        pairs = torch.unflatten(torch.unflatten(lower, -2, (count, 2, width)), -1, (count, 2, width))
        # [..., count, width, width]: the block below the diagonal of each pair.
        below = pairs.diagonal(dim1=-6, dim2=-3)[..., 1, :, 0, :, :].movedim(-1, -3)
        upper_left = blocks[..., 0::2, :, :]
        lower_right = blocks[..., 1::2, :, :]
        lower_left = -lower_right @ below @ upper_left
        top = torch.cat([upper_left, torch.zeros_like(upper_left)], -1)
        blocks = torch.cat([top, torch.cat([lower_left, lower_right], -1)], -2)
    return blocks.squeeze(-3)
