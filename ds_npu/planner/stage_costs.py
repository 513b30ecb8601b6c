"""How long each rank of a pipeline works and waits where its stages cost differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule
from ds_npu.parallel.pipeline.timeline import Costs, timeline

PASSES = {Kind.BACKWARD: 2.0}
"""Of an action's stage, how often its matrix products are computed; all other actions once."""


@dataclass(frozen=True)
class RankTimes:
    """A run in which stages cost differently, in the unit of the costs."""

    makespan: float
    work: tuple[float, ...]
    """By rank."""

    def waits(self, rank: int) -> float:
        """The part of the makespan in which ``rank`` does nothing, from 0 to 1."""
        return 1 - self.work[rank] / self.makespan if self.makespan else 0.0

    @property
    def mean_wait(self) -> float:
        """The same of all ranks together."""
        return sum(map(self.waits, range(len(self.work)))) / len(self.work)


def rank_times(schedule: Schedule, costs: Sequence[float]) -> RankTimes:
    """Run ``schedule``, whose stage s takes ``costs[s]`` for each of F, I and W of a micro-batch.

    Messages take no time. Raises ScheduleError where ranks would wait for each other for ever.
    """
    start = timeline(schedule, Costs()).start
    ends: dict[Action, float] = {}
    free, work = [0.0] * len(schedule.rows), [0.0] * len(schedule.rows)
    # At equal costs an action starts behind all that it needs, and behind the one before it on its rank.
    for action in sorted(start, key=start.__getitem__):
        rank, seconds = schedule.rank_of[action.stage], PASSES.get(action.kind, 1.0) * costs[action.stage]
        free[rank] = ends[action] = max([free[rank], *(ends[each] for each in schedule.needs(action))]) + seconds
        work[rank] += seconds
    return RankTimes(max(free, default=0.0), tuple(work))
