"""The Ulysses exchange: all-to-alls between a rank's tokens with all heads and all tokens with a rank's heads.

    to heads     [B, s, N, D] -> [B, S, n, D]    for query, key and value
    to tokens    [B, S, n, D] -> [B, s, N, D]    for the result; what several ranks have of a head is summed

Each is the other's gradient. Shape letters: B batch, s tokens of a rank, S of its Ulysses group (as many as all ranks'
s together), N all heads and n a rank's, D width. Neither tokens nor heads need divide by the ranks.

Copies. An all-to-all sends and receives one run of memory for each rank. Of [B, s, N, D] a rank's heads are no run, so
that side is copied once, and must be. The other side is no copy: messages are [s, B, n, D], so that [B, S, n, D] lies
in memory as [S, B, n, D], which is the same for a batch of one.

    q = depart_to_heads(q_proj(x), exchange)        # every projection runs while what was made before it is exchanged
    k = depart_to_heads(k_proj(x), kv_exchange)
    v = depart_to_heads(v_proj(x), kv_exchange)
    out = attention(q.arrive(), k.arrive(), v.arrive())
    y = o_proj(depart_to_tokens(out, exchange).arrive())

An exchange is two nodes of autograd: going back, ``arrive`` sends the gradient and ``depart`` waits for it. Of the
nodes that are ready autograd runs the youngest. So all three gradients are sent first, and those of q and k are on
their way while the backward of v_proj runs, if each tensor departs right behind its projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ds_npu.comm.pending import Pending


@dataclass(frozen=True)
class Exchange:
    """What the ranks of a Ulysses group have of one tensor; raw all-to-alls of it, without gradients.

    Rank r has ``counts[r]`` tokens, behind those of rank r - 1, and computes ``heads[r]``. These ranges begin with 0,
    ascend and leave no head out; they overlap where ranks need the same heads. ``rank`` is this one's in ``group``,
    which is not used where it is the only one: then nothing is copied or sent, and the result is what was given.
    """

    group: Any
    rank: int
    counts: tuple[int, ...]
    heads: tuple[range, ...]

    def to_heads(self, x_BsND: torch.Tensor) -> Pending[torch.Tensor]:
        """This rank's heads of all tokens, [B, S, n, D], from all heads of its tokens. One copy, before it is sent.

        Raises ValueError for another shape.
        """
        batch, width = self._checked(x_BsND, self.counts[self.rank], self.heads[-1].stop)
        if len(self.counts) == 1:
            return Pending(x_BsND, None)
        to_each, from_each = self._sizes(batch * width)
        sent = x_BsND.new_empty(sum(to_each))
        for message, heads in zip(torch.split(sent, to_each), self.heads, strict=True):
            some = x_BsND[:, :, heads.start : heads.stop].transpose(0, 1)
            message.view(some.shape).copy_(some)
        tokens, mine = sum(self.counts), len(self.heads[self.rank])
        strides = (mine * width, batch * mine * width, width, 1)
        received = x_BsND.new_empty_strided((batch, tokens, mine, width), strides)
        flat = received.transpose(0, 1).view(-1)
        work = dist.all_to_all_single(flat, sent, from_each, to_each, group=self.group, async_op=True)
        return Pending(received, work)

    def to_tokens(self, x_BSnD: torch.Tensor) -> Pending[torch.Tensor]:
        """All heads of this rank's tokens, [B, s, N, D], from its heads of all tokens; not to be written meanwhile.

        What several ranks have of one head is summed in the order of the ranks, in float32 for 16-bit types. One copy,
        of what is received; one more where ``x`` does not lie as [S, B, n, D], and one to round 16-bit sums. Raises
        ValueError for another shape.
        """
        batch, width = self._checked(x_BSnD, sum(self.counts), len(self.heads[self.rank]))
        if len(self.counts) == 1:
            return Pending(x_BSnD, None)
        from_each, to_each = self._sizes(batch * width)
        sent = x_BSnD.transpose(0, 1).contiguous()
        received = x_BSnD.new_empty(sum(from_each))
        work = dist.all_to_all_single(received, sent.view(-1), from_each, to_each, group=self.group, async_op=True)
        # Autograd adds to a gradient in its place when nobody else holds it: what is sent is held until it is received.
        return Pending(received, work, lambda flat: self._joined(torch.split(flat, from_each), sent))

    def _checked(self, x: torch.Tensor, tokens: int, heads: int) -> tuple[int, int]:
        if x.dim() != 4 or x.shape[1:3] != (tokens, heads):
            raise ValueError(
                f"rank {self.rank} of a Ulysses group of {len(self.counts)} exchanges [B, {tokens} tokens, {heads} "
                f"heads, D]; found {tuple(x.shape)}"
            )
        return x.shape[0], x.shape[3]

    def _sizes(self, elements: int) -> tuple[list[int], list[int]]:
        """Of this rank's tokens each rank's heads, and of each rank's tokens this rank's heads, in elements."""
        mine = [elements * self.counts[self.rank] * len(heads) for heads in self.heads]
        return mine, [elements * count * len(self.heads[self.rank]) for count in self.counts]

    def _joined(self, parts: Sequence[torch.Tensor], like_SBnD: torch.Tensor) -> torch.Tensor:
        """Each rank's heads of this rank's tokens, side by side."""
        _, batch, _, width = like_SBnD.shape
        tokens, all_heads = self.counts[self.rank], self.heads[-1].stop
        overlap = sum(map(len, self.heads)) > all_heads
        dtype = torch.promote_types(like_SBnD.dtype, torch.float32) if overlap else like_SBnD.dtype
        whole = like_SBnD.new_empty(batch, tokens, all_heads, width, dtype=dtype)
        done = 0
        for part, heads in zip(parts, self.heads, strict=True):
            part_BsnD = part.view(tokens, batch, len(heads), width).transpose(0, 1)
            again = done - heads.start
            if again:
                whole[:, :, heads.start : done].add_(part_BsnD[:, :, :again])
            whole[:, :, done : heads.stop] = part_BsnD[:, :, again:]
            done = heads.stop
        return whole.to(like_SBnD.dtype)


Way = Callable[[torch.Tensor], Pending[torch.Tensor]]


class _Air:
    """What is in flight between two nodes, in either direction; nothing that has arrived is kept."""

    def __init__(self) -> None:
        self._pending: Pending[torch.Tensor] | None = None

    def take_off(self, pending: Pending[torch.Tensor]) -> None:
        self._pending = pending

    def land(self) -> torch.Tensor:
        if self._pending is None:
            raise RuntimeError("nothing is in flight: arrive was called before, and is to be called once")
        pending, self._pending = self._pending, None
        return pending.wait()


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forth: Way, air: _Air) -> torch.Tensor:
        ctx.air = air
        air.take_off(forth(x))
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.air.land(), None, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, back: Way, air: _Air) -> torch.Tensor:
        ctx.back, ctx.air = back, air
        return air.land()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A gradient that is None is zeros here: other ranks may have one, and all must exchange.
        ctx.air.take_off(ctx.back(grads[0]))
        return grads[0].new_empty(0), None, None


@dataclass(frozen=True)
class InFlight:
    """A tensor that has departed; nobody can read it before it has arrived."""

    sent: torch.Tensor
    """What departed, without gradients: its shape is known, and it can be sent again."""
    _ticket: torch.Tensor
    """The tensor itself where nothing is exchanged, else empty: it ties the nodes together."""
    _back: Way
    _air: _Air | None

    def arrive(self) -> torch.Tensor:
        """The tensor, waited for once and on every rank of the group; on an NPU the stream waits, not the host."""
        if self._air is None:
            return self._ticket
        function: Any = _Arrive  # torch's apply has no types
        arrived: torch.Tensor = function.apply(self._ticket, self._back, self._air)
        return arrived


def depart_to_heads(x_BsND: torch.Tensor, exchange: Exchange) -> InFlight:
    """Begin ``exchange.to_heads``; the gradient comes back by ``to_tokens``. Raises ValueError as that does."""
    return _depart(x_BsND, exchange, exchange.to_heads, exchange.to_tokens)


def depart_to_tokens(x_BSnD: torch.Tensor, exchange: Exchange) -> InFlight:
    """Begin ``exchange.to_tokens``; the gradient comes back by ``to_heads``. Raises ValueError as that does."""
    return _depart(x_BSnD, exchange, exchange.to_tokens, exchange.to_heads)


def _depart(x: torch.Tensor, exchange: Exchange, forth: Way, back: Way) -> InFlight:
    if len(exchange.counts) == 1:
        return InFlight(x.detach(), x, back, None)
    function: Any = _Depart
    air = _Air()
    return InFlight(x.detach(), function.apply(x, forth, air), back, air)
