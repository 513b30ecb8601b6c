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
from ds_npu.comm.pending import Pending
from ds_npu.ops.precision import accumulation_dtype
from ds_npu.parallel.context.axis import Ring
from ds_npu.parallel.context.kernel_calls import TOKEN_DIM
from ds_npu.parallel.context.online_softmax import Block, CallGradients, sum_of_calls
from ds_npu.parallel.context.ring_schedule import Hop, Step, ring_steps


class Route(Protocol):
    """The blocks of keys and values that a rank computes with, in order, and where their gradients go."""

    @property
    def steps(self) -> Sequence[Step]: ...

    def blocks(self, own: Block) -> Iterator[tuple[Step, Block]]:
        """Yield the blocks that this rank, with block ``own``, needs; the next one travels while the caller computes.

        Without tensors in ``own`` the others have none either, and nothing is sent. The caller should drop a block
        before it asks for the next one, which frees its memory.
        """
        ...

    def gradients(self, own: Block) -> BlockGradients:
        """The sum to which the gradients of those blocks are added, in the same order."""
        ...


class BlockGradients(Protocol):
    """The sum, over the ranks, of the gradients of each rank's block."""

    def add(self, step: Step, calls: Iterator[CallGradients]) -> None:
        """Add the gradients of the block of ``step``; iterating over ``calls`` computes them."""
        ...

    def total(self) -> Block:
        """The gradients of this rank's block, once those of every step were added."""
        ...


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
    """Blocks go around the ring. ``counts`` are the tokens of each ring rank, ``last`` is as in ``ring_steps``."""

    def __init__(self, ring: Ring, counts: Sequence[int], last: int | None = None) -> None:
        self.ring, self.counts = ring, counts
        self.steps = ring_steps(ring.rank, len(ring.ranks), ring.window, last)

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

    def gradients(self, own: Block) -> RingGradients:
        return RingGradients(self, own)


class RingGradients:
    """Sums that go around the ring one step behind the keys and values, in the accumulation dtype.

    A rank holds two of these sums, one that it sends and one that it receives, and the gradients of its own block.
    """

    def __init__(self, route: RingRoute, own: Block) -> None:
        self.ring, self.counts, self.like = route.ring, route.counts, own
        self.own: Block = ()
        self.incoming: Pending[torch.Tensor] | None = None
        """The sum for another rank's block, to which this rank adds next."""
        self.incoming_own: Pending[torch.Tensor] | None = None
        """The sum for this rank's block over the other ranks of an inner ring."""

    def add(self, step: Step, calls: Iterator[CallGradients]) -> None:
        hop, tokens = step.gradient, self.counts[step.source]
        if hop is None:
            self.own = sum_of_calls(self.like, tokens, calls)
            return
        flat = self._sum(step, tokens, list(calls))
        is_mine = hop.received == self.ring.rank
        if is_mine:
            self._add_incoming_own()
        empty = flat.new_empty(block_numel(self.like, self.counts[hop.received]))
        pending = send_receive(self.ring, hop, flat, empty, GRADIENTS)
        if is_mine:
            self.incoming_own = pending
        else:
            self.incoming = pending

    def _sum(self, step: Step, tokens: int, computed: list[CallGradients]) -> torch.Tensor:
        """The block's sum so far plus ``computed``; this waits for the sum only after ``computed`` was computed."""
        if step.adds and self.incoming is not None:
            flat, self.incoming = self.incoming.wait(), None
        else:
            like = self.like[0]
            flat = like.new_zeros(block_numel(self.like, tokens), dtype=accumulation_dtype(like.dtype))
        sums = unflatten_block(flat, self.like, tokens)
        for keys, gradients in computed:
            for total, gradient in zip(sums, gradients, strict=True):
                keys.add(total, gradient)
        return flat

    def _add_incoming_own(self) -> None:
        if self.incoming_own is None:
            return
        flat, self.incoming_own = self.incoming_own.wait(), None
        sums = unflatten_block(flat, self.like, self.counts[self.ring.rank])
        for total, gradient in zip(sums, self.own, strict=True):
            total += gradient
        self.own = sums

    def total(self) -> Block:
        self._add_incoming_own()
        return self.own


KEYS_AND_VALUES, GRADIENTS = 1, 2
"""Tags of messages: both kinds go from a rank to the next in one step."""


class SendReceive:
    """A send, whose tensor must not change until it has ended, and a receive."""

    def __init__(self, works: Sequence[dist.Work | None], sent: torch.Tensor) -> None:
        self.works, self.sent = works, sent

    def wait(self) -> None:
        for work in self.works:
            if work is not None:
                work.wait()


def send_receive(ring: Ring, hop: Hop, flat: torch.Tensor, empty: torch.Tensor, tag: int) -> Pending[torch.Tensor]:
    """Send ``flat`` and receive into ``empty`` as ``hop`` says."""
    to, origin = ring.ranks[hop.to], ring.ranks[hop.origin]
    if hop.link == "home":
        # One batch: in a circle of ranks that all send first, none would receive.
        batch = [
            dist.P2POp(dist.isend, flat, to, group=ring.group, tag=tag),
            dist.P2POp(dist.irecv, empty, origin, group=ring.group, tag=tag),
        ]
        return Pending(empty, SendReceive(dist.batch_isend_irecv(batch), flat))
    groups = ring.inner if hop.link == "inner" else ring.outer
    at, of_origin = (
        (rank % ring.window if hop.link == "inner" else rank // ring.window) % 2 for rank in (ring.rank, hop.origin)
    )
    send = functools.partial(dist.isend, flat, to, group=groups[at], tag=tag)
    receive = functools.partial(dist.irecv, empty, origin, group=groups[of_origin], tag=tag)
    calls = (send, receive) if at == 0 else (receive, send)
    return Pending(empty, SendReceive([call() for call in calls], flat))


class LocalRoute:
    """One block, this rank's own: nothing is sent."""

    steps = (Step(0, (), None, False),)

    def blocks(self, own: Block) -> Iterator[tuple[Step, Block]]:
        yield self.steps[0], own

    def gradients(self, own: Block) -> LocalGradients:
        return LocalGradients(own)


class LocalGradients:
    """The gradients of the one block."""

    def __init__(self, own: Block) -> None:
        self.own = own

    def add(self, step: Step, calls: Iterator[CallGradients]) -> None:
        self.own = sum_of_calls(self.own, self.own[0].shape[TOKEN_DIM], calls)

    def total(self) -> Block:
        return self.own


class GatherRoute:
    """One block: all ring ranks' keys and values, in the order of the sequence.

    ``pieces[r]`` are the tokens of ring rank r.
    """

    steps = (Step(0, (), None, False),)

    def __init__(self, group: dist.ProcessGroup, rank: int, pieces: Sequence[Sequence[range]]) -> None:
        self.group, self.rank, self.pieces = group, rank, pieces
        self.counts = [sum(map(len, ranges)) for ranges in pieces]

    def blocks(self, own: Block) -> Iterator[tuple[Step, Block]]:
        yield self.steps[0], self._gathered(own) if own else own

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

    def gradients(self, own: Block) -> GatheredGradients:
        return GatheredGradients(self, own)


class GatheredGradients:
    """The gradients of all tokens, summed over the ranks and scattered: each rank gets those of its own tokens."""

    mine: Pending[torch.Tensor]

    def __init__(self, route: GatherRoute, own: Block) -> None:
        self.route, self.own = route, own

    def add(self, step: Step, calls: Iterator[CallGradients]) -> None:
        counts, like = self.route.counts, self.own
        whole = sum_of_calls(like, sum(counts), calls)
        longest = block_numel(like, max(counts))
        of_ranks = like[0].new_empty(len(counts), longest, dtype=accumulation_dtype(like[0].dtype))
        for flat, count, ranges in zip(of_ranks, counts, self.route.pieces, strict=True):
            mine, rest = torch.tensor_split(flat, [block_numel(like, count)])
            rest.zero_()
            for target, source in zip(unflatten_block(mine, like, count), whole, strict=True):
                for tokens, values in _by_range(target, ranges):
                    values.copy_(source[:, tokens.start : tokens.stop])
        self.mine = scatter_parts(of_ranks.new_empty(longest), of_ranks, self.route.group)

    def total(self) -> Block:
        count = self.route.counts[self.route.rank]
        return unflatten_block(self.mine.wait()[: block_numel(self.own, count)], self.own, count)


def _by_range(x: torch.Tensor, ranges: Sequence[range]) -> Iterator[tuple[range, torch.Tensor]]:
    return zip(ranges, torch.split(x, [len(tokens) for tokens in ranges], TOKEN_DIM), strict=True)
