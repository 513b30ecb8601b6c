"""How keys and values come to the ranks that compute with them, and their gradients back: rings, or one gathering."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ds_npu.comm.collectives import gather_parts, scatter_parts
from ds_npu.comm.pending import Pending
from ds_npu.ops.attention.document import wide
from ds_npu.parallel.context.axis import Ring
from ds_npu.parallel.context.kernel_calls import TOKEN_DIM
from ds_npu.parallel.context.online_softmax import Block, Part, summed
from ds_npu.parallel.context.ring_schedule import Hop, Step, ring_steps


class Route(Protocol):
    """The blocks that a rank computes with, one after the other, and what becomes of their gradients."""

    @property
    def steps(self) -> Sequence[Step]: ...

    def blocks(self, own: Block) -> Iterator[tuple[Step, Block]]:
        """From this rank's block the ones it needs; a next one is on its way while the caller computes.

        Without tensors in ``own`` there are none in the others, and nothing is sent. A block that the caller lets go
        before it asks for the next one makes room for another.
        """
        ...

    def gradients(self, own: Block) -> Gradients:
        """What takes the gradients of those blocks, in the same order."""
        ...


class Gradients(Protocol):
    """The sum, over the ranks, of gradients of each rank's block."""

    def add(self, step: Step, parts: Iterator[Part]) -> None:
        """Those of the step's block, computed as they are taken."""
        ...

    def total(self) -> Block:
        """Those of this rank's block, once every step was added."""
        ...


def flattened(block: Block) -> torch.Tensor:
    """All tensors of a block in one, one behind the other: a message."""
    return torch.cat([x.reshape(-1) for x in block])


def unflattened(flat: torch.Tensor, like: Block, tokens: int) -> Block:
    """Views of ``flat`` as the tensors of a block of ``tokens`` tokens, otherwise shaped as ``like``."""
    shapes = [(x.shape[0], tokens, *x.shape[2:]) for x in like]
    bounds = [0, *itertools.accumulate(torch.Size(shape).numel() for shape in shapes)]
    return tuple(
        flat[begin:end].view(shape) for (begin, end), shape in zip(itertools.pairwise(bounds), shapes, strict=True)
    )


def numbers(block: Block, tokens: int) -> int:
    """The length of ``flattened`` with ``tokens`` tokens."""
    return sum(x.shape[0] * tokens * x.shape[2:].numel() for x in block)


class RingRoute:
    """Through the ring. ``counts`` are the tokens of each ring rank, ``last`` as in ``ring_steps``."""

    def __init__(self, ring: Ring, counts: Sequence[int], last: int | None = None) -> None:
        self.ring, self.counts = ring, counts
        self.steps = ring_steps(ring.rank, len(ring.ranks), ring.window, last)

    def blocks(self, own: Block) -> Iterator[tuple[Step, Block]]:
        if not own:
            yield from ((step, ()) for step in self.steps)
            return
        held = {self.ring.rank: Pending(flattened(own), None)}
        yield from ((step, self._taken(step, held, own)) for step in self.steps)

    def _taken(self, step: Step, held: dict[int, Pending[torch.Tensor]], own: Block) -> Block:
        """The step's block out of those that are ``held``, to which come those that are on their way from now on."""
        flat = held.pop(step.source).wait()
        for hop in step.hops:
            empty = flat.new_empty(numbers(own, self.counts[hop.received]))
            held[hop.received] = exchange(self.ring, hop, flat, empty, KEYS_AND_VALUES)
        return unflattened(flat, own, self.counts[step.source])

    def gradients(self, own: Block) -> RingGradients:
        return RingGradients(self, own)


class RingGradients:
    """Sums that travel one step behind the keys and values, in the dtype in which gradients are summed.

    A rank holds two of them, of which it sends one and receives the other, and the gradients of its own block.
    """

    def __init__(self, route: RingRoute, own: Block) -> None:
        self.ring, self.counts, self.like = route.ring, route.counts, own
        self.own: Block = ()
        self.coming: Pending[torch.Tensor] | None = None
        self.home: Pending[torch.Tensor] | None = None

    def add(self, step: Step, parts: Iterator[Part]) -> None:
        hop, tokens = step.gradient, self.counts[step.source]
        if hop is None:
            self.own = summed(self.like, tokens, parts)
            return
        flat = self._sum(step, tokens, list(parts))
        is_mine = hop.received == self.ring.rank
        if is_mine:
            self._land()
        empty = flat.new_empty(numbers(self.like, self.counts[hop.received]))
        coming = exchange(self.ring, hop, flat, empty, GRADIENTS)
        if is_mine:
            self.home = coming
        else:
            self.coming = coming

    def _sum(self, step: Step, tokens: int, computed: list[Part]) -> torch.Tensor:
        """What came of the block's sum, waited for once the rank has ``computed`` its own part, and that."""
        if step.adds and self.coming is not None:
            flat, self.coming = self.coming.wait(), None
        else:
            like = self.like[0]
            flat = like.new_zeros(numbers(self.like, tokens), dtype=wide(like.dtype))
        sums = unflattened(flat, self.like, tokens)
        for places, gradients in computed:
            for total, gradient in zip(sums, gradients, strict=True):
                places.add(total, gradient)
        return flat

    def _land(self) -> None:
        """Add what came home: the sum over the ranks of an inner ring but for this rank's own part."""
        if self.home is None:
            return
        flat, self.home = self.home.wait(), None
        sums = unflattened(flat, self.like, self.counts[self.ring.rank])
        for total, gradient in zip(sums, self.own, strict=True):
            total += gradient
        self.own = sums

    def total(self) -> Block:
        self._land()
        return self.own


KEYS_AND_VALUES, GRADIENTS = 1, 2
"""Tags: both kinds of message go from a rank to the next in one step."""


class _Both:
    """A message that is sent (and must not be changed until it is) and one that is received."""

    def __init__(self, works: Sequence[Any], sent: torch.Tensor) -> None:
        self.works, self.sent = works, sent

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def exchange(ring: Ring, hop: Hop, flat: torch.Tensor, empty: torch.Tensor, tag: int) -> Pending[torch.Tensor]:
    """Send ``flat`` and receive ``empty`` as ``hop`` says."""
    to, origin = ring.ranks[hop.to], ring.ranks[hop.origin]
    if hop.link == "home":
        # Between any two ranks; started together, for in a circle of ranks that all send first none would receive.
        together = [
            dist.P2POp(dist.isend, flat, to, group=ring.group, tag=tag),
            dist.P2POp(dist.irecv, empty, origin, group=ring.group, tag=tag),
        ]
        return Pending(empty, _Both(dist.batch_isend_irecv(together), flat))
    groups = ring.inner if hop.link == "inner" else ring.outer
    at, of_origin = (
        (rank % ring.window if hop.link == "inner" else rank // ring.window) % 2 for rank in (ring.rank, hop.origin)
    )
    send = functools.partial(dist.isend, flat, to, group=groups[at], tag=tag)
    receive = functools.partial(dist.irecv, empty, origin, group=groups[of_origin], tag=tag)
    calls = (send, receive) if at == 0 else (receive, send)
    return Pending(empty, _Both([call() for call in calls], flat))


class Stay:
    """Of a rank that has all it needs: one block, its own."""

    steps = (Step(0, (), None, False),)

    def blocks(self, own: Block) -> Iterator[tuple[Step, Block]]:
        yield self.steps[0], own

    def gradients(self, own: Block) -> KeptGradients:
        return KeptGradients(own)


class KeptGradients:
    """The gradients of the one block."""

    def __init__(self, own: Block) -> None:
        self.own = own

    def add(self, step: Step, parts: Iterator[Part]) -> None:
        self.own = summed(self.own, self.own[0].shape[TOKEN_DIM], parts)

    def total(self) -> Block:
        return self.own


class GatherRoute:
    """All keys and values at once, in the order of the sequence; ``places[r]`` are the tokens of ring rank r in it."""

    steps = (Step(0, (), None, False),)

    def __init__(self, group: Any, rank: int, places: Sequence[Sequence[range]]) -> None:
        self.group, self.rank, self.places = group, rank, places
        self.counts = [sum(map(len, ranges)) for ranges in places]

    def blocks(self, own: Block) -> Iterator[tuple[Step, Block]]:
        yield self.steps[0], self._gathered(own) if own else own

    def _gathered(self, own: Block) -> Block:
        # Ranks may have one token less than others; not every backend gathers parts of different lengths.
        longest = numbers(own, max(self.counts))
        short = longest - numbers(own, self.counts[self.rank])
        mine = flattened((*own, own[0].new_zeros(short)) if short else own)
        parts = gather_parts(mine.new_empty(len(self.counts), longest), mine, self.group).wait()
        whole = tuple(x.new_empty(x.shape[0], sum(self.counts), *x.shape[2:]) for x in own)
        for part, count, ranges in zip(parts, self.counts, self.places, strict=True):
            for target, source in zip(whole, unflattened(part[: numbers(own, count)], own, count), strict=True):
                for place, piece in _pieces(source, ranges):
                    target[:, place.start : place.stop] = piece
        return whole

    def gradients(self, own: Block) -> GatheredGradients:
        return GatheredGradients(self, own)


class GatheredGradients:
    """A sum over the ranks of which each gets its own tokens."""

    mine: Pending[torch.Tensor]

    def __init__(self, route: GatherRoute, own: Block) -> None:
        self.route, self.own = route, own

    def add(self, step: Step, parts: Iterator[Part]) -> None:
        counts, like = self.route.counts, self.own
        whole = summed(like, sum(counts), parts)
        longest = numbers(like, max(counts))
        of_ranks = like[0].new_empty(len(counts), longest, dtype=wide(like[0].dtype))
        for flat, count, ranges in zip(of_ranks, counts, self.route.places, strict=True):
            mine, rest = torch.tensor_split(flat, [numbers(like, count)])
            rest.zero_()
            for target, source in zip(unflattened(mine, like, count), whole, strict=True):
                for place, piece in _pieces(target, ranges):
                    piece.copy_(source[:, place.start : place.stop])
        self.mine = scatter_parts(of_ranks.new_empty(longest), of_ranks, self.route.group)

    def total(self) -> Block:
        count = self.route.counts[self.route.rank]
        return unflattened(self.mine.wait()[: numbers(self.own, count)], self.own, count)


def _pieces(x: torch.Tensor, ranges: Sequence[range]) -> Iterator[tuple[range, torch.Tensor]]:
    return zip(ranges, torch.split(x, [len(place) for place in ranges], TOKEN_DIM), strict=True)
