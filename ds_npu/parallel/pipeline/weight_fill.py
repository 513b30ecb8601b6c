"""Weight gradients in the places where a rank would wait: the second half of every zero-bubble schedule."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from ds_npu.parallel.pipeline.schedule import Action, Kind, Rows, Schedule


def with_weight_gradients(main: Rows, most_live: int) -> Schedule:
    """Insert a W for every I of ``main``, where its rank would wait, or where memory for the next forward is needed.

    ``main``: for each rank its F and I, whose order stays. No rank keeps activations of more than ``most_live``
    (stage, micro-batch) at a time. Every action takes one unit of time. Source: Qi et al. 2024 (arXiv 2401.10241).
    """
    schedule = Schedule.of(main)
    ranks = [_Rank(row, most_live) for row in schedule.rows]
    ends: dict[Action, int] = {}
    clock: list[int] = [0]
    while clock:
        now = heapq.heappop(clock)
        for rank in ranks:
            action = rank.take(now, schedule, ends) if rank.free_at <= now else None
            if action is not None:
                rank.free_at = ends[action] = now + 1
                if now + 1 not in clock:
                    heapq.heappush(clock, now + 1)
    return Schedule.of([rank.row for rank in ranks])


class _Rank:
    """One rank while its row is made."""

    def __init__(self, main: Sequence[Action], most_live: int) -> None:
        self.main, self.most_live = deque(main), most_live
        self.weights: deque[Action] = deque()
        self.row: list[Action] = []
        self.free_at = self.live = 0

    def take(self, now: int, schedule: Schedule, ends: dict[Action, int]) -> Action | None:
        """Append what the rank does from ``now`` on; None where it waits."""
        if self.main and self._may_run(self.main[0], now, schedule, ends):
            action = self.main.popleft()
        elif self.weights:
            action = self.weights.popleft()
        else:
            return None
        self.row.append(action)
        self.live += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD_WEIGHT)
        if action.kind is Kind.BACKWARD_INPUT:
            self.weights.append(Action(action.stage, Kind.BACKWARD_WEIGHT, action.micro_batch))
        return action

    def _may_run(self, action: Action, now: int, schedule: Schedule, ends: dict[Action, int]) -> bool:
        has_room = action.kind is not Kind.FORWARD or self.live < self.most_live
        return has_room and all(ends.get(each, now + 1) <= now for each in schedule.needs(action))
