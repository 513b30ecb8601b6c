"""Recomputation in the places where a rank would wait: forwards run again before the backwards that need them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule
from ds_npu.parallel.pipeline.timeline import Costs

UNITS = Costs()
BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def recomputed(schedule: Schedule, most_ahead: int = 0) -> Schedule:
    """Insert an R for every backward of ``schedule``, whose other actions keep their order.

    It stands directly before its backward, so that it runs while the gradient is on its way; or earlier, where the rank
    would wait, as long as the rank then keeps activations of at most ``most_ahead`` (stage, micro-batch) more than it
    does without moving. A backward that stands right behind its forward has none: nothing would be freed.
    Source: MindSpeed's recompute-in-advance and recompute-in-bubble (ripipe_schedules.py), here for every schedule.
    """
    inline = Schedule.of([list(_with_inline(row)) for row in schedule.rows])
    if most_ahead == 0:
        return inline
    ranks = [
        _Rank(row, inline.rows[index], inline.peak_activations[index] + most_ahead)
        for index, row in enumerate(schedule.rows)
    ]
    ends: dict[Action, float] = {}
    clock = [0.0]
    while clock:
        now = heapq.heappop(clock)
        for rank in ranks:
            action = rank.take(now, schedule, ends) if rank.free_at <= now else None
            if action is not None:
                rank.free_at = ends[action] = now + UNITS.of(action)
                heapq.heappush(clock, rank.free_at)
    return Schedule.of([rank.row for rank in ranks])


def again(action: Action) -> Action:
    """The R of a backward."""
    return action._replace(kind=Kind.RECOMPUTE)


def _with_inline(row: Sequence[Action]) -> Iterator[Action]:
    for index, action in enumerate(row):
        if action.kind in BACKWARDS and row[index - 1] != action._replace(kind=Kind.FORWARD):
            yield again(action)
        yield action


class _Rank:
    """One rank while its row is made."""

    def __init__(self, main: Sequence[Action], inline: Sequence[Action], most_live: int) -> None:
        """``main``: without recomputation; ``inline``: with it."""
        self.main, self.most_live = list(main), most_live
        self.waiting = [each for each in inline if each.kind is Kind.RECOMPUTE]
        """R that have not run, in the order of their backwards."""
        self.recomputes = set(self.waiting)
        self.row: list[Action] = []
        self.free_at = 0.0
        self.live = 0

    def take(self, now: float, schedule: Schedule, ends: Mapping[Action, float]) -> Action | None:
        """Append what the rank does from ``now`` on; None where it waits."""
        action = self._chosen(now, schedule, ends)
        if action is None:
            return None
        if action.kind is Kind.RECOMPUTE:
            self.waiting.remove(action)
        else:
            self.main.pop(0)
        self.row.append(action)
        self.live += self._change(action)
        return action

    def _change(self, action: Action) -> int:
        """Of how many micro-batches more activations are kept behind ``action``."""
        keeps = action.kind is Kind.FORWARD and again(action) not in self.recomputes
        return (keeps or action.kind is Kind.RECOMPUTE) - (action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT))

    def _chosen(self, now: float, schedule: Schedule, ends: Mapping[Action, float]) -> Action | None:
        if not self.main:
            return None
        following = self.main[0]
        needs_first = following.kind in BACKWARDS and again(following) in self.waiting
        if all(ends.get(each, now + 1) <= now for each in schedule.needs(following)):
            return again(following) if needs_first else following
        if not self.waiting or ends.get(self.waiting[0]._replace(kind=Kind.FORWARD), now + 1) > now:
            return None
        first = self.waiting[0]
        until = next(index for index, each in enumerate(self.main) if each in (_backward(first), _input(first)))
        more_meanwhile = max(accumulate(map(self._change, self.main[:until]), initial=0))
        return first if self.live + more_meanwhile < self.most_live else None


def _backward(action: Action) -> Action:
    return action._replace(kind=Kind.BACKWARD)


def _input(action: Action) -> Action:
    return action._replace(kind=Kind.BACKWARD_INPUT)
