"""Routes of keys and values to the ranks that compute with them, and of their gradients back.

RingRoute      send and receive from rank to rank (ring attention, double ring: see ``ring_schedule``)
GatherRoute    one all-gather before attention, one reduce-scatter of the gradients after it (Llama 3,
               arXiv:2407.21783, section 3.3.2)
LocalRoute     nothing: this rank has all keys and values of its heads (Ulysses)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ds_npu.comm.collectives import gather_parts, scatter_parts
from ds_npu.comm.pending import Pending, Works
from ds_npu.ops.precision import accumulation_dtype
from ds_npu.parallel.context.axis import Ring
from ds_npu.parallel.context.kernel_calls import TOKEN_DIM
from ds_npu.parallel.context.online_softmax import Block, CallGradients, sum_of_calls
from ds_npu.parallel.context.ring_schedule import Hop, Step, ring_steps


class Route(Protocol):
    """The blocks of keys and values that a rank computes with, in order, and the sums of their gradients.

    A route serves one forward, or one backward, which adds the gradients of the blocks in their order.
    """

    def blocks(self, own: Block) -> Iterator[tuple[Step, Block]]:
        """Yield the blocks that this rank, with block ``own``, needs; the next one travels while the caller computes.

        If ``own`` has no tensors, all blocks are empty and nothing is sent. The caller should drop a block before it
        asks for the next one, which frees its memory.
        """

    def add(self, step: Step, own: Block, calls: Iterator[CallGradients]) -> None:
        """Add the gradients of the block of ``step``; iterating over ``calls`` computes them."""

    def total(self, own: Block) -> Block:
        """The sum over the ranks of the gradients of the block ``own``, once those of every step were added."""


def flatten_block(block: Block) -> torch.Tensor:
    """All tensors of a block, flattened and concatenated: a message."""
    return torch.cat([x.reshape(-1) for x in block])


def unflatten_block(flat: torch.Tensor, like: Block, tokens: int) -> Block:
    """Views of ``flat`` as the tensors of a block of ``tokens`` tokens, otherwise shaped as ``like``."""
    shapes = [(x.shape[0], tokens, *x.shape[2:]) for x in like]
    bounds = [0, *itertools.accumulate(torch.Size(shape).numel() for shape in shapes)]
    return tuple(
        flat[begin:end].view(shape) for (begin, end), shape in zip(itertools.pairwise(bounds), shapes, strict=True)
    )


def block_numel(block: Block, tokens: int) -> int:
    """The length of ``flatten_block`` with ``tokens`` tokens."""
    return sum(x.shape[0] * tokens * x.shape[2:].numel() for x in block)


class RingRoute:
    """Blocks go around the ring. ``counts`` are the tokens of each ring rank, ``last`` is as in ``ring_steps``.

    Sums of gradients go around the ring one step behind the keys and values, in the accumulation dtype. A rank holds
    two of these sums, one that it sends and one that it receives, and the gradients of its own block.
    """

    def __init__(self, ring: Ring, counts: Sequence[int], last: int | None = None) -> None:
        self.ring, self.counts = ring, counts
        self.steps = ring_steps(ring.rank, len(ring.ranks), ring.window, last)
        self._mine: Block = ()
        self._incoming: Pending[torch.Tensor] | None = None
        """The sum for another rank's block, to which this rank adds next."""
        self._incoming_own: Pending[torch.Tensor] | None = None
        """The sum for this rank's block over the other ranks of an inner ring."""

    def blocks(self, own: Block) -> Iterator[tuple[Step, Block]]:
        if not own:
            yield from ((step, ()) for step in self.steps)
            return
        held = {self.ring.rank: Pending(flatten_block(own), None)}
        yield from ((step, self._block(step, held, own)) for step in self.steps)

    def _block(self, step: Step, held: dict[int, Pending[torch.Tensor]], own: Block) -> Block:
        """Wait for the block of ``step``, and post the messages of the step; their blocks enter ``held``."""
        flat = held.pop(step.source).wait()
        for hop in step.hops:
            empty = flat.new_empty(block_numel(own, self.counts[hop.received]))
            held[hop.received] = send_receive(self.ring, hop, flat, empty, KEYS_AND_VALUES)
        return unflatten_block(flat, own, self.counts[step.source])

    def add(self, step: Step, own: Block, calls: Iterator[CallGradients]) -> None:
        hop = step.gradient
        if hop is None:
            self._mine = sum_of_calls(own, self.counts[step.source], calls)
            return
        flat = self._sum(step, own, list(calls))
        is_mine = hop.received == self.ring.rank
        if is_mine:
            self.total(own)
        empty = flat.new_empty(block_numel(own, self.counts[hop.received]))
        pending = send_receive(self.ring, hop, flat, empty, GRADIENTS)
        if is_mine:
            self._incoming_own = pending
        else:
            self._incoming = pending

    def _sum(self, step: Step, own: Block, computed: list[CallGradients]) -> torch.Tensor:
        """The block's sum so far plus ``computed``; this waits for the sum only after ``computed`` was computed."""
        tokens = self.counts[step.source]
        if step.adds and self._incoming is not None:
            flat = self._incoming.wait()
            self._incoming = None
        else:
            flat = own[0].new_zeros(block_numel(own, tokens), dtype=accumulation_dtype(own[0].dtype))
        sums = unflatten_block(flat, own, tokens)
        for keys, gradients in computed:
            for total, gradient in zip(sums, gradients, strict=True):
                keys.add(total, gradient)
        return flat

    def total(self, own: Block) -> Block:
        if self._incoming_own is not None:
            flat = self._incoming_own.wait()
            self._incoming_own = None
            sums = unflatten_block(flat, own, self.counts[self.ring.rank])
            for total, gradient in zip(sums, self._mine, strict=True):
                total += gradient
            self._mine = sums
        return self._mine


ONLY_STEP = Step(0, (), None, False)
KEYS_AND_VALUES, GRADIENTS = 1, 2
"""Tags of messages: both kinds go from a rank to the next in one step."""


def send_receive(ring: Ring, hop: Hop, flat: torch.Tensor, empty: torch.Tensor, tag: int) -> Pending[torch.Tensor]:
    """Send ``flat``, which must not change until that has ended, and receive into ``empty`` as ``hop`` says."""
    to, origin = ring.ranks[hop.to], ring.ranks[hop.origin]
    if hop.link == "home":
        # One batch: in a circle of ranks that all send first, none would receive.
        batch = [
            dist.P2POp(dist.isend, flat, to, group=ring.group, tag=tag),
            dist.P2POp(dist.irecv, empty, origin, group=ring.group, tag=tag),
        ]
        return Pending(empty, Works(dist.batch_isend_irecv(batch)), sent=flat)
    groups = ring.inner if hop.link == "inner" else ring.outer
    at, of_origin = (
        (rank % ring.window if hop.link == "inner" else rank // ring.window) % 2 for rank in (ring.rank, hop.origin)
    )
    send = functools.partial(dist.isend, flat, to, group=groups[at], tag=tag)
    receive = functools.partial(dist.irecv, empty, origin, group=groups[of_origin], tag=tag)
    calls = (send, receive) if at == 0 else (receive, send)
    return Pending(empty, Works([call() for call in calls]), sent=flat)


class LocalRoute:
    """One block, this rank's own: nothing is sent."""

    def blocks(self, own: Block) -> Iterator[tuple[Step, Block]]:
        yield ONLY_STEP, own

    def add(self, step: Step, own: Block, calls: Iterator[CallGradients]) -> None:
        self._mine = sum_of_calls(own, own[0].shape[TOKEN_DIM], calls)

    def total(self, own: Block) -> Block:
        return self._mine


class GatherRoute:
    """One block: all ring ranks' keys and values, in the order of the sequence.

    ``pieces[r]`` are the tokens of ring rank r. The gradients of all tokens are summed over the ranks and scattered:
    each rank gets those of its own tokens.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, pieces: Sequence[Sequence[range]]) -> None:
        self.group, self.rank, self.pieces = group, rank, pieces
        self.counts = [sum(map(len, ranges)) for ranges in pieces]

    def blocks(self, own: Block) -> Iterator[tuple[Step, Block]]:
        yield ONLY_STEP, self._gathered(own) if own else own

    def _gathered(self, own: Block) -> Block:
        # Ranks may have one token less than others; not every backend gathers parts of different lengths.
        longest = block_numel(own, max(self.counts))
        short = longest - block_numel(own, self.counts[self.rank])
        mine = flatten_block((*own, own[0].new_zeros(short)) if short else own)
        parts = gather_parts(mine.new_empty(len(self.counts), longest), mine, self.group).wait()
        whole = tuple(x.new_empty(x.shape[0], sum(self.counts), *x.shape[2:]) for x in own)
        for part, count, ranges in zip(parts, self.counts, self.pieces, strict=True):
            block = unflatten_block(part[: block_numel(own, count)], own, count)
            for target, source in zip(whole, block, strict=True):
                for tokens, values in _by_range(source, ranges):
                    target[:, tokens.start : tokens.stop] = values
        return whole

    def add(self, step: Step, own: Block, calls: Iterator[CallGradients]) -> None:
        whole = sum_of_calls(own, sum(self.counts), calls)
        longest = block_numel(own, max(self.counts))
        of_ranks = own[0].new_empty(len(self.counts), longest, dtype=accumulation_dtype(own[0].dtype))
        for flat, count, ranges in zip(of_ranks, self.counts, self.pieces, strict=True):
            mine, rest = torch.tensor_split(flat, [block_numel(own, count)])
            rest.zero_()
            for target, source in zip(unflatten_block(mine, own, count), whole, strict=True):
                for tokens, values in _by_range(target, ranges):
                    values.copy_(source[:, tokens.start : tokens.stop])
        self._mine = scatter_parts(of_ranks.new_empty(longest), of_ranks, self.group)

    def total(self, own: Block) -> Block:
        count = self.counts[self.rank]
        return unflatten_block(self._mine.wait()[: block_numel(own, count)], own, count)


def _by_range(x: torch.Tensor, ranges: Sequence[range]) -> Iterator[tuple[range, torch.Tensor]]:
    return zip(ranges, torch.split(x, [len(tokens) for tokens in ranges], TOKEN_DIM), strict=True)
