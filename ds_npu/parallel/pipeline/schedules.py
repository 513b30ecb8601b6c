"""Every schedule by the name that ``ds_npu.pipeline.schedule`` gives it: pure functions of ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ds_npu.parallel.pipeline.dualpipe_v import dualpipe_v
from ds_npu.parallel.pipeline.schedule import Action, Kind, Rows, Schedule
from ds_npu.parallel.pipeline.v_shape import v_half, v_min, zb_v
from ds_npu.parallel.pipeline.weight_fill import with_weight_gradients


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards. Source: Huang et al. 2019 (arXiv 1811.06965)."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return Schedule.of(
        [[Action(rank, kind, index) for kind in kinds for index in range(micro_batches)] for rank in range(ranks)]
    )


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Backwards begin as soon as they can, one for each forward. Source: PipeDream-flush (arXiv 2006.09503)."""
    return Schedule.of(_alternating(micro_batches, [ranks - rank for rank in range(ranks)], Kind.BACKWARD))


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """1F1B's activations and, with weight gradients apart, a third of its bubble. Source: arXiv 2401.10241."""
    main = _alternating(micro_batches, [ranks - rank for rank in range(ranks)], Kind.BACKWARD_INPUT)
    return with_weight_gradients(main, ranks)


def zb_h2(ranks: int, micro_batches: int) -> Schedule:
    """No bubble where F, I and W cost the same, but 2P-1 activations in place of P. Source: arXiv 2401.10241."""
    main = _alternating(micro_batches, [2 * (ranks - rank) - 1 for rank in range(ranks)], Kind.BACKWARD_INPUT)
    return with_weight_gradients(main, 2 * ranks - 1)


def _alternating(micro_batches: int, warm_up: list[int], backward: Kind) -> Rows:
    """The row of each rank: ``warm_up`` forwards, then backwards and forwards alternately."""
    rows = []
    for rank, count in enumerate(warm_up):
        forwards = [Action(rank, Kind.FORWARD, index) for index in range(micro_batches)]
        backwards = [Action(rank, backward, index) for index in range(micro_batches)]
        rows.append([*forwards[:count], *_one_of_each(backwards, forwards[count:])])
    return rows


def _one_of_each(first: list[Action], second: list[Action]) -> Iterator[Action]:
    for index in range(max(len(first), len(second))):
        yield from first[index : index + 1]
        yield from second[index : index + 1]


def interleaved(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B over ``chunks`` stages of each rank: rank r has stages r, r + P, ... Its bubble is 1F1B's over ``chunks``.

    Groups of at least P micro-batches run through one stage of the rank before the next. Source: Narayanan et al. 2021
    (Megatron-LM, arXiv 2104.04473); groups of other sizes: torch.distributed.pipelining.
    """
    count = max(1, micro_batches // ranks)
    ends = [micro_batches * (index + 1) // count for index in range(count)]
    groups = [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    rows = []
    for rank in range(ranks):
        own = [chunk * ranks + rank for chunk in range(chunks)]
        there = [(stage, index) for group in groups for stage in own for index in group]
        back = [(stage, index) for group in groups for stage in reversed(own) for index in group]
        forwards = [Action(stage, Kind.FORWARD, index) for stage, index in there]
        backwards = [Action(stage, Kind.BACKWARD, index) for stage, index in back]
        warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * max(map(len, groups)) + 1
        rows.append([*forwards[:warm_up], *_one_of_each(backwards, forwards[warm_up:])])
    return Schedule.of(rows)


@dataclass(frozen=True)
class Named:
    """A schedule that a section can name."""

    make: Callable[[int, int, int], Schedule]
    """Makes the schedule from (ranks, micro-batches, chunks of each rank)."""
    chunks: int | None = 1
    """The number of stages of each rank; None: ``virtual_stages``."""
    fewest_micro_batches: Callable[[int], int] = lambda ranks: 1


def _fixed(make: Callable[[int, int], Schedule]) -> Callable[[int, int, int], Schedule]:
    return lambda ranks, micro_batches, chunks: make(ranks, micro_batches)


SCHEDULES = {
    "gpipe": Named(_fixed(gpipe)),
    "1f1b": Named(_fixed(one_f_one_b)),
    "interleaved": Named(interleaved, None),
    "zb_h1": Named(_fixed(zb_h1)),
    "zb_h2": Named(_fixed(zb_h2)),
    "zb_v": Named(_fixed(zb_v), 2),
    "v_half": Named(_fixed(v_half), 2),
    "v_min": Named(_fixed(v_min), 2),
    "dualpipe_v": Named(_fixed(dualpipe_v), 2, lambda ranks: 2 * ranks),
}
"""Schedules by the value of ``ds_npu.pipeline.schedule``."""
