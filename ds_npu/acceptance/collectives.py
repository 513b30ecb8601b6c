"""Every collective, over the NPUs of this machine, against results that each rank computes by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_npu import capability
from ds_npu.acceptance.case import Check, Measured, NotRunError
from ds_npu.acceptance.collective_cases import FUSED, OBJECTS, CollectiveCase, collective_cases
from ds_npu.acceptance.rank import Assignment, npu_module, run_cases, timed
from ds_npu.comm.collectives import all_gather, all_reduce, reduce_scatter
from ds_npu.ops import matmul_collective
from ds_npu.ops.self_check import FLOAT32_UNIT
from ds_npu.parallel.tensor.overlapped_matmul import Fused

PERIOD = 17
"""Number of integers that messages repeat."""
MOST_ROWS = 512
"""Rows of a fused product that are compared."""
TIMED_FROM = 1 << 20
"""Elements of the smallest timed message: a smaller one says nothing about a link."""


class Part(NamedTuple):
    """``length`` elements that repeat the integers of ``period``."""

    period: torch.Tensor
    length: int


class Exchange(NamedTuple):
    """A call that may be repeated, and the parts of its result."""

    call: Callable[[], torch.Tensor]
    expected: Sequence[Part]


@dataclass(frozen=True)
class Peers:
    """The ranks of a case, its dtype and size; ``group`` None is torch's default."""

    rank: int
    size: int
    dtype: torch.dtype
    count: int
    group: dist.ProcessGroup | None

    @property
    def ranks(self) -> range:
        return range(self.size)

    def period(self, rank: int, to: int = 0) -> torch.Tensor:
        """The integers that ``rank`` sends to rank ``to``, in an order that depends on both.

        In uint8 they count from 0.
        """
        lowest = 0 if self.dtype == torch.uint8 else -(PERIOD // 2)
        return (torch.arange(PERIOD) + 5 * rank + 3 * to) % PERIOD + lowest

    def repeated(self, part: Part) -> torch.Tensor:
        """The elements of a part, on the CPU."""
        return part.period.to(self.dtype).repeat(-(-part.length // PERIOD))[: part.length]

    def sent(self, *parts: Part) -> torch.Tensor:
        """``parts``, concatenated on this rank's NPU."""
        return torch.cat([self.repeated(part) for part in parts]).to("npu")

    def mine(self) -> torch.Tensor:
        """The elements that this rank passes to the call, on its NPU."""
        return self.sent(Part(self.period(self.rank), self.count))

    def total(self) -> torch.Tensor:
        """The period of the sum over ranks."""
        return torch.stack([self.period(rank) for rank in self.ranks]).sum(0)

    def differing(self, found: torch.Tensor, expected: Sequence[Part]) -> Check:
        """Count the elements of ``found`` that differ from the concatenated parts of ``expected``."""
        if found.numel() != sum(part.length for part in expected):
            raise ValueError(f"{found.numel()} elements; {sum(part.length for part in expected)} are right")
        parts = torch.split(found.cpu().flatten(), [part.length for part in expected])
        pairs = zip(parts, expected, strict=True)
        return Check("elements that differ", sum(int((x != self.repeated(part)).sum()) for x, part in pairs), 0)


def _all_reduce(peers: Peers) -> Exchange:
    mine = peers.mine()
    return Exchange(lambda: all_reduce(mine.clone(), peers.group).wait(), [Part(peers.total(), peers.count)])


def _all_reduce_largest(peers: Peers) -> Exchange:
    mine = peers.mine()
    largest = torch.stack([peers.period(rank) for rank in peers.ranks]).amax(0)

    def call() -> torch.Tensor:
        dist.all_reduce(found := mine.clone(), dist.ReduceOp.MAX, group=peers.group)
        return found

    return Exchange(call, [Part(largest, peers.count)])


def _all_reduce_in_pairs(peers: Peers) -> Exchange:
    """All-reduce in all pairs of ranks at once, each with its own communicator, as tensor ranks do."""
    pairs = [list(peers.ranks[first : first + 2]) for first in peers.ranks[::2]]
    group = [dist.new_group(pair) for pair in pairs][peers.rank // 2]
    mine = peers.mine()
    total = torch.stack([peers.period(rank) for rank in pairs[peers.rank // 2]]).sum(0)
    return Exchange(lambda: all_reduce(mine.clone(), group).wait(), [Part(total, peers.count)])


def _all_gather(peers: Peers) -> Exchange:
    mine = peers.mine()
    parts = [Part(peers.period(rank), peers.count) for rank in peers.ranks]
    return Exchange(lambda: all_gather(mine, 0, peers.group).wait(), parts)


def _reduce_scatter(peers: Peers) -> Exchange:
    whole = peers.sent(Part(peers.period(peers.rank), peers.count * peers.size))
    total = peers.total().roll(-(peers.rank * peers.count % PERIOD))
    return Exchange(lambda: reduce_scatter(whole, 0, peers.group).wait(), [Part(total, peers.count)])


def _all_to_all(peers: Peers, count: Callable[[int, int], int]) -> Exchange:
    to_each = [Part(peers.period(peers.rank, to), count(peers.rank, to)) for to in peers.ranks]
    from_each = [Part(peers.period(rank, peers.rank), count(rank, peers.rank)) for rank in peers.ranks]
    sent = peers.sent(*to_each)

    def call() -> torch.Tensor:
        found = sent.new_empty(sum(part.length for part in from_each))
        received, given = ([part.length for part in parts] for parts in (from_each, to_each))
        dist.all_to_all_single(found, sent, received, given, group=peers.group)
        return found

    return Exchange(call, from_each)


def _batched(peers: Peers) -> Exchange:
    """Send around the ring of all ranks in one batch, as ring attention does."""
    mine = peers.mine()
    previous = (peers.rank - 1) % peers.size

    def call() -> torch.Tensor:
        found = torch.empty_like(mine)
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, (peers.rank + 1) % peers.size, group=peers.group),
                dist.P2POp(dist.irecv, found, previous, group=peers.group),
            ]
        ):
            work.wait()
        return found

    return Exchange(call, [Part(peers.period(previous), peers.count)])


def _send_and_receive(peers: Peers) -> Exchange:
    """Exchange in pairs of neighbours, the even rank sends first; the last of an odd number keeps its own."""
    mine, other = peers.mine(), peers.rank ^ 1
    if other >= peers.size:
        return Exchange(lambda: mine, [Part(peers.period(peers.rank), peers.count)])

    def call() -> torch.Tensor:
        found = torch.empty_like(mine)
        calls = [(dist.isend, mine), (dist.irecv, found)]
        works = [start(x, other, group=peers.group) for start, x in (calls if peers.rank < other else calls[::-1])]
        for work in filter(None, works):
            work.wait()
        return found

    return Exchange(call, [Part(peers.period(other), peers.count)])


def _broadcast(peers: Peers) -> Exchange:
    mine, source = peers.mine(), peers.size - 1

    def call() -> torch.Tensor:
        dist.broadcast(found := mine.clone(), source, group=peers.group)
        return found

    return Exchange(call, [Part(peers.period(source), peers.count)])


def _two_in_flight(peers: Peers) -> Exchange:
    mine = peers.mine()

    def call() -> torch.Tensor:
        gathered = all_gather(mine, 0, peers.group)
        summed = all_reduce(mine.clone(), peers.group)
        doubled = mine + mine
        return torch.cat([summed.wait(), gathered.wait(), doubled - mine])

    periods = [peers.total(), *map(peers.period, peers.ranks), peers.period(peers.rank)]
    return Exchange(call, [Part(period, peers.count) for period in periods])


EXCHANGES: dict[str, Callable[[Peers], Exchange]] = {
    "all-reduce": _all_reduce,
    "all-reduce, largest": _all_reduce_largest,
    "all-reduce in pairs": _all_reduce_in_pairs,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": lambda peers: _all_to_all(peers, lambda rank, to: peers.count),
    # Each rank sends each, itself included, from nothing to twice the count.
    "all-to-all, uneven": lambda peers: _all_to_all(peers, lambda rank, to: (rank + 2 * to) % 3 * peers.count),
    "batched send and receive": _batched,
    "send and receive": _send_and_receive,
    "broadcast": _broadcast,
    "two in flight": _two_in_flight,
}


def _reals(peers: Peers, kind: str) -> Check:
    each = [_normal(rank, (peers.size, peers.count), peers.dtype) for rank in peers.ranks]
    terms = torch.stack([x.double() for x in each])
    exact, size = terms.sum(0), terms.abs().sum(0)
    mine = each[peers.rank].to("npu")
    if kind.startswith("all-reduce"):
        found = all_reduce(mine, peers.group).wait()
    else:
        found = reduce_scatter(mine, 0, peers.group).wait()[0]
        exact, size = exact[peers.rank], size[peers.rank]
    return _rounding(found, exact, size, peers.size * torch.finfo(peers.dtype).eps / 2)


def _normal(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _rounding(found: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, unit: float) -> Check:
    error = (found.cpu().double() - exact).abs()
    worst = int((error - unit * size).argmax())
    return Check("largest error", float(error.flatten()[worst]), unit * float(size.flatten()[worst]))


def _objects(peers: Peers) -> Check:
    """Gather and broadcast Python objects whose lengths differ by rank, as checkpoints and agreements do."""
    everyones: list[object] = [None] * peers.size
    dist.all_gather_object(everyones, {"rank": peers.rank, "text": "x" * 1000 * peers.rank})
    box: list[object] = [{"from": 0}] if peers.rank == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    right = [{"rank": rank, "text": "x" * 1000 * rank} for rank in peers.ranks]
    return Check("objects that differ", (everyones != right) + (box != [{"from": 0}]), 0)


def _fused(peers: Peers, kind: str, sizes: tuple[int, int]) -> Check:
    """A matrix product in one kernel with its collective; ``sizes``: the inner dimension, and the columns.

    Only some of many rows are compared: the reference of all would take the CPU minutes.
    """
    if why := matmul_collective.why_unavailable():
        raise NotRunError(str(why))
    rows, (inner, columns) = peers.count, sizes
    left = [_normal(rank, (1, rows, inner), peers.dtype) for rank in peers.ranks]
    own = _normal(100 + peers.rank, (inner, columns), peers.dtype)
    group = dist.distributed_c10d._get_default_group()
    fused = Fused(group)
    mine, matrix = left[peers.rank].to("npu"), own.to("npu")
    unit = peers.size * max(torch.finfo(peers.dtype).eps, FLOAT32_UNIT) / 2
    if kind == FUSED[0]:
        _, (found,) = fused.gather_matmul(mine, [matrix])
        some = _some_of(peers.size * rows)
        pairs = [(torch.cat(left, 1)[:, some].double(), own.double())]
    else:
        found = fused.matmul_scatter([(mine, matrix)]).wait()
        some = _some_of(rows // peers.size)
        begins = peers.rank * rows // peers.size
        others = (_normal(100 + rank, (inner, columns), peers.dtype) for rank in peers.ranks)
        pairs = [(x[:, begins + some].double(), y.double()) for x, y in zip(left, others, strict=True)]
    exact, size = (sum((f(x) @ f(y) for x, y in pairs), torch.zeros(())) for f in (torch.clone, torch.abs))
    return _rounding(found[:, some.to("npu")], exact, size, unit)


def _some_of(rows: int) -> torch.Tensor:
    """Indices of all rows, or of about MOST_ROWS, the last one included."""
    return torch.arange(rows - 1, -1, -max(1, rows // MOST_ROWS))


def run_collective(case: CollectiveCase, job: Assignment) -> Measured:
    """Run one collective on all ranks of the case."""
    group = None
    if case.buffer_mib is not None:
        group = dist.new_group(pg_options=capability.hccl_options({capability.BUFFER_SIZE: case.buffer_mib}))
    peers = Peers(dist.get_rank(), dist.get_world_size(), case.dtype, case.count, group)
    call_s = None
    if case.kind == OBJECTS:
        check = _objects(peers)
    elif case.kind in FUSED:
        check = _fused(peers, case.kind, (case.inner, case.columns))
    elif case.kind.endswith("of reals"):
        check = _reals(peers, case.kind)
    else:
        exchange = EXCHANGES[case.kind](peers)
        check = peers.differing(exchange.call(), exchange.expected)
        call_s = None if job.scope.small or case.count < TIMED_FROM else timed(exchange.call)
    if group is not None:
        npu_module().synchronize()
        dist.destroy_process_group(group)
    return Measured([check], call_s=call_s)


if __name__ == "__main__":
    sys.exit(run_cases(collective_cases, run_collective, distributed=True))
