"""Schedules in which each rank has a stage of the model's first half and one of its second: rank r has r and 2P-1-r.

Each is a building block, repeated for every micro-batch six units of time later (F, I, W of two stages), squeezed where
the pipeline fills and drains, with weight gradients where ranks would wait. A block is given by the offsets between a
stage and the next in forward (= in backward), for the first and the second half: the smaller, the less is kept.
Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule
from ds_npu.parallel.pipeline.weight_fill import with_weight_gradients

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
    """More units of time before the first backward of the second half, and of the first: no two actions coincide."""

    def times(self, rank: int) -> tuple[tuple[int, int, Kind], ...]:
        """(time, stage, kind) of the four actions of ``rank`` on micro-batch 0."""
        there, back = self.first * rank, self.second * (self.ranks - 1 - rank)
        turn = self.first * (self.ranks - 1) + 1
        half = turn + self.second * (self.ranks - 1) + 1 + self.pauses[0]
        mirror = 2 * self.ranks - 1 - rank
        return (
            (there, rank, Kind.FORWARD),
            (turn + back, mirror, Kind.FORWARD),
            (half + there, mirror, Kind.BACKWARD_INPUT),
            (half + turn + self.pauses[1] + back, rank, Kind.BACKWARD_INPUT),
        )


def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """No bubble where F, I and W cost the same; activations as 1F1B (2P halves)."""
    return _repeated(Block(ranks, 4, 2, (0, 0)), micro_batches)


def v_half(ranks: int, micro_batches: int) -> Schedule:
    """About half of 1F1B's activations, and about half of its bubble."""
    return _repeated(Block(ranks, 2, 1, (3 * (ranks % 2 == 0), 1)), micro_batches)


def v_min(ranks: int, micro_batches: int) -> Schedule:
    """About a third of 1F1B's activations, and a bubble like its."""
    return _repeated(Block(ranks, 1, 1, (2 * (ranks % 3 == 0), 0)), micro_batches)


def _repeated(block: Block, micro_batches: int) -> Schedule:
    table = _TimeTable(block, micro_batches)
    most_live = max(max(live) for live in table.live)
    table.squeeze(most_live)
    main = [
        [action for _, action in sorted(row.items()) if action.kind is not Kind.BACKWARD_WEIGHT] for row in table.rows
    ]
    return with_weight_gradients(main, most_live)


class _TimeTable:
    """The actions of each rank by the unit of time in which they run."""

    def __init__(self, block: Block, micro_batches: int) -> None:
        self.time: dict[Action, int] = {}
        self.rows: list[dict[int, Action]] = [{} for _ in range(block.ranks)]
        for rank in range(block.ranks):
            for start, stage, kind in block.times(rank):
                for index in range(micro_batches):
                    self._put(rank, Action(stage, kind, index), start + PERIOD * index)
            self._put_weights(rank)
        self.schedule = Schedule.of([list(row.values()) for row in self.rows])
        self.length = 1 + max(map(max, self.rows))
        self.live = [self._live_activations(rank) for rank in range(block.ranks)]

    def _put(self, rank: int, action: Action, at: int) -> None:
        self.rows[rank][at] = action
        self.time[action] = at

    def _put_weights(self, rank: int) -> None:
        """Each weight part in the next free unit of time."""
        row, queue, at = self.rows[rank], deque[Action](), 0
        last = max(row)
        while at <= last or queue:
            action = row.get(at)
            if action is None and queue:
                self._put(rank, queue.popleft(), at)
            elif action is not None and action.kind is Kind.BACKWARD_INPUT:
                queue.append(Action(action.stage, Kind.BACKWARD_WEIGHT, action.micro_batch))
            at += 1

    def _live_activations(self, rank: int) -> list[int]:
        live, found = 0, []
        for at in range(self.length):
            action = self.rows[rank].get(at)
            live += action is not None and action.kind is Kind.FORWARD
            found.append(live)
            live -= action is not None and action.kind is Kind.BACKWARD_WEIGHT
        return found

    def squeeze(self, most_live: int) -> None:
        """Move each action, in the order of time, to the first free unit in which it can run within ``most_live``."""
        for action, before in sorted(self.time.items(), key=lambda item: (item[1], item[0].stage)):
            rank = self.schedule.rank_of[action.stage]
            row, live = self.rows[rank], self.live[rank]
            needed = list(self.schedule.needs(action))
            if action.micro_batch and action.kind is not Kind.BACKWARD_WEIGHT:
                needed.append(action._replace(micro_batch=action.micro_batch - 1))
            begin = max((self.time[each] + 1 for each in needed), default=0)
            if action.kind is Kind.FORWARD:
                full = [at for at in range(begin, before) if live[at] >= most_live]
                begin = full[-1] + 1 if full else begin
            at = next((at for at in range(begin, before) if at not in row), before)
            if at == before:
                continue
            del row[before]
            self._put(rank, action, at)
            for between in range(at, before):
                live[between] += action.kind is Kind.FORWARD
                live[between + 1] -= action.kind is Kind.BACKWARD_WEIGHT
