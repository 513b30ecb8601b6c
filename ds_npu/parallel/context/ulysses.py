"""The Ulysses all-to-all: it exchanges a rank's tokens with all heads for all tokens with a rank's heads.

    to heads     [B, s, N, D] -> [B, S, n, D]    of query, key and value
    to tokens    [B, S, n, D] -> [B, s, N, D]    of the result; a head that several ranks have is summed

A rank computes some of the query heads over all tokens of its group, and receives only the key and value heads that
those use (``share_heads``).

Each all-to-all is the gradient of the other. Shape letters: B batch, s tokens of a rank, S tokens of its Ulysses group
(the sum of s over its ranks), N all heads, n heads of a rank, D width. Neither tokens nor heads need divide by the
ranks. Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509.

Copies. An all-to-all sends and receives one contiguous run for each rank. In [B, s, N, D] the heads of one rank are not
contiguous, so that side is copied once, and must be. The other side is not copied: messages are [s, B, n, D], so that
[B, S, n, D] lies in memory as [S, B, n, D], which is the same for a batch of one.

    q = post_to_heads(q_proj(x), all_to_all)       # its message travels while the next projection is computed
    k = post_to_heads(k_proj(x), kv_all_to_all)
    v = post_to_heads(v_proj(x), kv_all_to_all)
    out = attention(q.wait(), k.wait(), v.wait())
    y = o_proj(post_to_tokens(out, all_to_all).wait())

An all-to-all is two autograd nodes, post and wait. In backward the node of ``wait`` posts the gradient, and the node of
``post`` waits for it. Autograd runs the youngest of the nodes that are ready. So all three gradients are posted first,
and those of q and k travel while the backward of v_proj runs, if each tensor is posted right behind its projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ds_npu.comm.pending import InFlight, Pending
from ds_npu.ops.autograd import Context, applied
from ds_npu.ops.precision import accumulation_dtype
from ds_npu.parallel.tensor.sharding import near_even


@dataclass(frozen=True)
class Heads:
    """Ulysses rank r computes the query heads ``queries[r]``, with the key and value heads ``keys[r]``.

    Each query head belongs to one rank. A key and value head goes to all ranks whose query heads use it: with fewer of
    them than ranks they are replicated, and where all ranks need all of them, gathered.
    """

    queries: tuple[range, ...]
    keys: tuple[range, ...]
    queries_per_key: int

    def key_head_indices(self, rank: int) -> tuple[int, ...] | None:
        """The index of each query head's key and value head, among those of ``rank``.

        None where consecutive query heads share one evenly: the usual grouped-query attention.
        """
        queries, keys = self.queries[rank], self.keys[rank]
        used = tuple(head // self.queries_per_key - keys.start for head in queries)
        share = len(queries) // len(keys)
        return None if used == tuple(index // share for index in range(len(queries))) else used


def share_heads(query_heads: int, kv_heads: int, ranks: int) -> Heads:
    """Divide ``query_heads`` heads, consecutive and near-evenly, over ``ranks`` Ulysses ranks.

    ``query_heads / kv_heads`` consecutive query heads share a key and value head. Raises ValueError where the heads do
    not divide, or where a rank would have none.
    """
    if query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads cannot share {kv_heads} key and value heads evenly")
    if query_heads < ranks:
        raise ValueError(
            f"{query_heads} query heads (of this tensor rank) cannot be shared by {ranks} ranks of "
            f"ds_npu.context_parallel.ulysses, each of which needs one: found {ranks}, at most {query_heads} are "
            'possible (algorithm "ulysses" has all of ds_npu.parallel.context, "hybrid" leaves the others to a ring)'
        )
    share = query_heads // kv_heads
    queries = tuple(range(begin, end) for begin, end in near_even(query_heads, ranks))
    keys = tuple(range(mine[0] // share, mine[-1] // share + 1) for mine in queries)
    return Heads(queries, keys, share)


@dataclass(frozen=True)
class UlyssesAllToAll:
    """The all-to-alls of one tensor in a Ulysses group, without autograd, and the tokens and heads of each rank.

    Rank r has ``counts[r]`` tokens, behind those of rank r - 1, and computes ``heads[r]``. These ranges begin with 0,
    ascend and leave no head out; they overlap where ranks need the same heads. ``rank`` is this rank's in
    ``group``. In a group of one rank nothing is copied or sent: the result is the input itself.
    """

    group: dist.ProcessGroup | None
    rank: int
    counts: tuple[int, ...]
    heads: tuple[range, ...]

    def to_heads(self, x_BsND: torch.Tensor) -> Pending[torch.Tensor]:
        """Post all heads of this rank's tokens; receive this rank's heads of all tokens, [B, S, n, D].

        Copies once, before sending. Raises ValueError for another shape.
        """
        batch, width = self._checked(x_BsND, self.counts[self.rank], self.heads[-1].stop)
        if len(self.counts) == 1:
            return Pending(x_BsND, None)
        to_each, from_each = self._sizes(batch * width)
        sent = x_BsND.new_empty(sum(to_each))
        for message, heads in zip(torch.split(sent, to_each), self.heads, strict=True):
            some = x_BsND[:, :, heads.start : heads.stop].transpose(0, 1)
            message.view(some.shape).copy_(some)
        tokens = sum(self.counts)
        mine = len(self.heads[self.rank])
        strides = (mine * width, batch * mine * width, width, 1)
        received = x_BsND.new_empty_strided((batch, tokens, mine, width), strides)
        flat = received.transpose(0, 1).view(-1)
        work = dist.all_to_all_single(flat, sent, from_each, to_each, group=self.group, async_op=True)
        return Pending(received, work, sent=sent)

    def to_tokens(self, x_BSnD: torch.Tensor) -> Pending[torch.Tensor]:
        """Post this rank's heads of all tokens; receive all heads of this rank's tokens, [B, s, N, D].

        Nobody may write to ``x`` before the result was waited for. A head that several ranks have is summed in the
        order of the ranks, in float32 for 16-bit types. Copies received data once; copies ``x`` where it does not lie
        as [S, B, n, D], and once more to round 16-bit sums. Raises ValueError for another shape.
        """
        batch, width = self._checked(x_BSnD, sum(self.counts), len(self.heads[self.rank]))
        if len(self.counts) == 1:
            return Pending(x_BSnD, None)
        from_each, to_each = self._sizes(batch * width)
        sent = x_BSnD.transpose(0, 1).contiguous()
        received = x_BSnD.new_empty(sum(from_each))
        work = dist.all_to_all_single(received, sent.view(-1), from_each, to_each, group=self.group, async_op=True)
        # Autograd adds to a gradient in place when nobody else holds it: ``sent`` is held until the result is there.
        return Pending(received, work, lambda flat: self._joined(torch.split(flat, from_each), sent))

    def _checked(self, x: torch.Tensor, tokens: int, heads: int) -> tuple[int, int]:
        if x.dim() != 4 or x.shape[1:3] != (tokens, heads):
            raise ValueError(
                f"rank {self.rank} of a Ulysses group of {len(self.counts)} exchanges [B, {tokens} tokens, {heads} "
                f"heads, D]; found {tuple(x.shape)}"
            )
        return x.shape[0], x.shape[3]

    def _sizes(self, elements: int) -> tuple[list[int], list[int]]:
        """Elements exchanged with each rank: this rank's tokens of its heads, and its tokens of this rank's heads."""
        mine = [elements * self.counts[self.rank] * len(heads) for heads in self.heads]
        return mine, [elements * count * len(self.heads[self.rank]) for count in self.counts]

    def _joined(self, parts: Sequence[torch.Tensor], like_SBnD: torch.Tensor) -> torch.Tensor:
        """All heads of this rank's tokens [B, s, N, D], from each rank's heads; overlapping ones are summed."""
        _, batch, _, width = like_SBnD.shape
        tokens = self.counts[self.rank]
        all_heads = self.heads[-1].stop
        overlap = sum(map(len, self.heads)) > all_heads
        dtype = accumulation_dtype(like_SBnD.dtype) if overlap else like_SBnD.dtype
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


Collective = Callable[[torch.Tensor], Pending[torch.Tensor]]


Buffer = InFlight[torch.Tensor]


class _PostContext(Context):
    buffer: Buffer


class _Post(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _PostContext, x: torch.Tensor, collective: Collective, buffer: Buffer) -> torch.Tensor:
        ctx.buffer = buffer
        buffer.post(collective(x))
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: _PostContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.buffer.wait(), None, None


class _WaitContext(_PostContext):
    gradient_collective: Collective


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _WaitContext, posted: torch.Tensor, gradient_collective: Collective, buffer: Buffer
    ) -> torch.Tensor:
        ctx.gradient_collective, ctx.buffer = gradient_collective, buffer
        return buffer.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: _WaitContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Autograd gives zeros for a missing gradient: other ranks may have one, and all must join the all-to-all.
        ctx.buffer.post(ctx.gradient_collective(grads[0]))
        return grads[0].new_empty(0), None, None


_post = applied(_Post, _Post.forward)
_wait = applied(_Wait, _Wait.forward)


@dataclass(frozen=True)
class PostedTensor:
    """A tensor whose all-to-all was posted; ``wait`` returns the result."""

    sent: torch.Tensor
    """The tensor that was posted, without gradients; it can be sent again."""
    _posted: torch.Tensor
    """The tensor itself where nothing is sent, else an empty one that connects the two autograd nodes."""
    _gradient_collective: Collective
    _buffer: Buffer | None

    def wait(self) -> torch.Tensor:
        """The result. Every rank of the group calls it, once; on an NPU the stream waits, not the host.

        Raises RuntimeError at a second call.
        """
        if self._buffer is None:
            return self._posted
        return _wait(self._posted, self._gradient_collective, self._buffer)


def post_to_heads(x_BsND: torch.Tensor, all_to_all: UlyssesAllToAll) -> PostedTensor:
    """Post ``all_to_all.to_heads``; the gradient goes back by ``to_tokens``. Raises ValueError as that does."""
    return _posted(x_BsND, all_to_all, all_to_all.to_heads, all_to_all.to_tokens)


def post_to_tokens(x_BSnD: torch.Tensor, all_to_all: UlyssesAllToAll) -> PostedTensor:
    """Post ``all_to_all.to_tokens``; the gradient goes back by ``to_heads``. Raises ValueError as that does."""
    return _posted(x_BSnD, all_to_all, all_to_all.to_tokens, all_to_all.to_heads)


def _posted(
    x: torch.Tensor, all_to_all: UlyssesAllToAll, collective: Collective, gradient_collective: Collective
) -> PostedTensor:
    if len(all_to_all.counts) == 1:
        return PostedTensor(x.detach(), x, gradient_collective, None)
    buffer: Buffer = InFlight()
    return PostedTensor(x.detach(), _post(x, collective, buffer), gradient_collective, buffer)
