"""Every schedule by the name that ``ds_npu.pipeline.schedule`` gives it: pure functions of ranks and micro-batches.

In a ``paired`` schedule a forward of one micro-batch and a backward of another overlap on a rank. The tokens of one
travel between the ranks of experts while the other computes (``parallel.runtime.paired_passes``). A pair begins when
both can, and its results leave when both have ended: a schedule needs slack for that. DualPipeV has it; 1F1B has it
where a rank keeps two micro-batches more than the next one, and not one more. Sources: DualPipe (deepseek-ai, arXiv
2412.19437); Megatron-LM (combined 1F1B); torch.distributed.pipelining (OVERLAP_F_B).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ds_npu.parallel.pipeline.fill import with_weight_gradients
from ds_npu.parallel.pipeline.schedule import Action, Kind, Rows, Schedule
from ds_npu.parallel.pipeline.v_shape import dualpipe_v, v_half, v_min, zb_v


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
    """A schedule that ``ds_npu.pipeline.schedule`` may name."""

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


def paired(schedule: Schedule, forward_first: bool) -> Schedule:
    """Pair each forward of ``schedule`` with the whole backward that follows it, of another micro-batch.

    Without ``forward_first`` pair each backward with the forward that follows it, and put the forward before it.
    """
    rows, pairs = [], []
    for row in schedule.rows:
        made: list[Action] = []
        for action in row:
            last = made[-1] if made else None
            if last is not None and last not in pairs and (len(made) < 2 or made[-2] not in pairs):
                forward, backward = (last, action) if forward_first else (action, last)
                kinds = forward.kind is Kind.FORWARD and backward.kind is Kind.BACKWARD
                if kinds and forward.micro_batch != backward.micro_batch:
                    made[-1:] = [forward, backward]
                    pairs.append(forward)
                    continue
            made.append(action)
        rows.append(made)
    return Schedule.of(rows, pairs)


PAIRED: dict[str, Callable[[int, int, int], Schedule]] = {
    "1f1b": lambda ranks, micro_batches, chunks: paired(interleaved(ranks, micro_batches, 1), forward_first=False),
    "interleaved": lambda ranks, micro_batches, chunks: paired(interleaved(ranks, micro_batches, chunks), False),
    "dualpipe_v": lambda ranks, micro_batches, chunks: paired(dualpipe_v(ranks, micro_batches), forward_first=True),
}
"""Makers of schedules from (ranks, micro-batches, chunks of each rank), by value of ``ds_npu.pipeline.schedule``."""
