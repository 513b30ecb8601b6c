"""Schedules in which rank r has stage r, of the model's first half, and stage 2P-1-r, of its second.

All but DualPipeV are a building block, repeated for every micro-batch six units of time later (F, I, W of two stages),
squeezed where the pipeline fills and drains, with weight gradients where ranks would wait. A block is given by the
offsets between a stage and the next in forward (= in backward), for the first and the second half: smaller ones keep
fewer activations.
Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362).

DualPipeV pairs a forward of one micro-batch with the backward of another. Its eight phases, as DeepSeek's description
of it counts them; rank r of P has stages r (0) and 2P-1-r (1), of M micro-batches:

    1  F0             2 (P-1-r) times
    2  F0 F1          r+1
    3  I1 W F1        P-1-r
    4  F0 B1 F1 B0    M-2P+r+1
    5  B1 F1 B0       P-1-r
    6  B1 B0          r+1; the weight parts of the second half of these backwards wait
    7  W I0           P-1-r
    8  W              r+1

Source: deepseek-ai/DualPipe (dualpipe/dualpipev.py); the DeepSeek-V3 report (arXiv 2412.19437).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import accumulate

from ds_npu.parallel.pipeline.fill import with_weight_gradients
from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule
from ds_npu.parallel.pipeline.timeline import Clock, Costs

PERIOD = 6
"""Units of time from one micro-batch to the next."""


@dataclass(frozen=True)
class Block:
    """One micro-batch's forwards and backwards on ``ranks``."""

    ranks: int
    first: int
    """Units of time from a stage of the first half to the next one."""
    second: int
    pauses: tuple[int, int]
    """Units of time added before the backwards of the second half, and of the first: no two actions may coincide."""

    def times(self, rank: int) -> tuple[tuple[int, int, Kind], ...]:
        """(time, stage, kind) of the four actions of ``rank`` on micro-batch 0."""
        there = self.first * rank
        back = self.second * (self.ranks - 1 - rank)
        middle = self.first * (self.ranks - 1) + 1
        half = middle + self.second * (self.ranks - 1) + 1 + self.pauses[0]
        mirror = 2 * self.ranks - 1 - rank
        return (
            (there, rank, Kind.FORWARD),
            (middle + back, mirror, Kind.FORWARD),
            (half + there, mirror, Kind.BACKWARD_INPUT),
            (half + middle + self.pauses[1] + back, rank, Kind.BACKWARD_INPUT),
        )


def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """No bubble where F, I and W cost the same; activations as 1F1B (2P halves)."""
    return _repeated(Block(ranks, 4, 2, (0, 0)), micro_batches)


def v_half(ranks: int, micro_batches: int) -> Schedule:
    """About half of 1F1B's activations, and about half of its bubble."""
    return _repeated(Block(ranks, 2, 1, (3 * (ranks % 2 == 0), 1)), micro_batches)


def v_min(ranks: int, micro_batches: int) -> Schedule:
    """About a third of 1F1B's activations, and about the same bubble."""
    return _repeated(Block(ranks, 1, 1, (2 * (ranks % 3 == 0), 0)), micro_batches)


def _repeated(block: Block, micro_batches: int) -> Schedule:
    rows = [_block_row(block, rank, micro_batches) for rank in range(block.ranks)]
    most_live = max(Schedule.of([[row[at] for at in sorted(row)] for row in rows]).peak_activations)
    _squeeze(rows, most_live)
    main = [[row[at] for at in sorted(row) if row[at].kind is not Kind.BACKWARD_WEIGHT] for row in rows]
    return with_weight_gradients(main, most_live)


def _block_row(block: Block, rank: int, micro_batches: int) -> dict[int, Action]:
    """The actions of ``rank`` by the unit of time in which they run; each weight part in the next free one."""
    row = {
        start + PERIOD * index: Action(stage, kind, index)
        for start, stage, kind in block.times(rank)
        for index in range(micro_batches)
    }
    queue, at, last = deque[Action](), 0, max(row)
    while at <= last or queue:
        action = row.get(at)
        if action is None and queue:
            row[at] = queue.popleft()
        elif action is not None and action.kind is Kind.BACKWARD_INPUT:
            queue.append(action._replace(kind=Kind.BACKWARD_WEIGHT))
        at += 1
    return row


def _squeeze(rows: list[dict[int, Action]], most_live: int) -> None:
    """Move each action, in the order of time, to the first free unit in which it can run within ``most_live``."""
    clock = Clock(Schedule.of([list(row.values()) for row in rows]), Costs())
    kinds = [{at: action.kind for at, action in row.items()} for row in rows]
    changes = [
        [
            (own.get(at) is Kind.FORWARD) - (own.get(at - 1) is Kind.BACKWARD_WEIGHT)
            for at in range(1 + max(map(max, rows)))
        ]
        for own in kinds
    ]
    lives = [[*accumulate(each)] for each in changes]
    order = sorted((at, action.stage, rank) for rank, row in enumerate(rows) for at, action in row.items())
    for before, _, rank in order:
        row, live = rows[rank], lives[rank]
        action = row.pop(before)
        begin = clock.arrival(action)
        if action.micro_batch and action.kind is not Kind.BACKWARD_WEIGHT:
            begin = max(begin, clock.end[action._replace(micro_batch=action.micro_batch - 1)])
        units = range(int(begin), before)
        if action.kind is Kind.FORWARD:
            full = [at for at in units if live[at] >= most_live]
            units = range(full[-1] + 1, before) if full else units
        at = next((at for at in units if at not in row), before)
        row[at] = action
        clock.begin((action,), at)
        for between in range(at, before):
            live[between] += action.kind is Kind.FORWARD
            live[between + 1] -= action.kind is Kind.BACKWARD_WEIGHT


def dualpipe_v(ranks: int, micro_batches: int) -> Schedule:
    """Make the schedule of at least 2P micro-batches; a rank keeps 2P+1 halves of its activations."""
    return Schedule.of([_dualpipe_row(ranks, rank, micro_batches) for rank in range(ranks)])


def _dualpipe_row(ranks: int, rank: int, micro_batches: int) -> list[Action]:
    behind, last = ranks - 1 - rank, rank + 1
    cooling = [f"{kind}{chunk}" for kind, chunk in zip("B" * last + "I" * last, "10" * last, strict=True)]
    phases = (
        ("F0", 2 * behind),
        ("F0 F1", last),
        ("I1 W F1", behind),
        ("F0 B1 F1 B0", micro_batches - 2 * ranks + last),
        ("B1 F1 B0", behind),
        (" ".join(cooling), 1),
        ("W I0", behind),
        ("W", last),
    )
    counts: Counter[str] = Counter()
    weights: deque[Action] = deque()
    row: list[Action] = []
    for word in (word for words, times in phases for _ in range(times) for word in words.split()):
        if word == "W":
            row.append(weights.popleft())
            continue
        kind = Kind(word[0])
        stage = (rank, 2 * ranks - 1 - rank)[int(word[1])]
        # One count for all backwards of a stage, whole (B) or not (I).
        counted = f"{stage}{kind is Kind.FORWARD}"
        row.append(Action(stage, kind, counts[counted]))
        counts[counted] += 1
        if kind is Kind.BACKWARD_INPUT:
            weights.append(Action(stage, Kind.BACKWARD_WEIGHT, row[-1].micro_batch))
    return row
