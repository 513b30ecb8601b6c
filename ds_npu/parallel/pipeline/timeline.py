"""When each action of a schedule runs, given what actions cost: makespan, bubble, and whether it ends at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule, ScheduleError


@dataclass(frozen=True)
class Costs:
    """What a stage costs on one micro-batch, in any unit of time."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0
    """From one rank to another; it runs beside computation."""
    stages: Sequence[float] = ()
    """By stage, what its costs are multiplied by; empty: stages are alike."""

    def of(self, action: Action) -> float:
        cost = {
            Kind.BACKWARD: self.backward_input + self.backward_weight,
            Kind.BACKWARD_INPUT: self.backward_input,
            Kind.BACKWARD_WEIGHT: self.backward_weight,
        }.get(action.kind, self.forward)
        return cost * self.stages[action.stage] if self.stages else cost


@dataclass(frozen=True)
class Timeline:
    """A run of a schedule."""

    schedule: Schedule
    costs: Costs
    start: Mapping[Action, float]

    def end(self, action: Action) -> float:
        return self.start[action] + self.costs.of(action)

    @property
    def makespan(self) -> float:
        """From the first action of any rank to the last one."""
        return max((self.end(row[-1]) for row in self.schedule.rows if row), default=0.0)

    @property
    def bubble(self) -> float:
        """The most that a rank waits between its first and its last action; optimizers that step alone see only this.

        Source: Qi et al. 2024 (arXiv 2401.10241), whose formulas count it so.
        """
        return max((self._waits(rank) for rank in range(len(self.schedule.rows))), default=0.0)

    def _waits(self, rank: int) -> float:
        row = self.schedule.rows[rank]
        return self.end(row[-1]) - self.start[row[0]] - self.work(rank) if row else 0.0

    def work(self, rank: int) -> float:
        """What all actions of ``rank`` take."""
        return sum(map(self.costs.of, self.schedule.rows[rank]))

    def idle(self, rank: int) -> float:
        """The part of the makespan in which ``rank`` does nothing, from 0 to 1."""
        return 1 - self.work(rank) / self.makespan if self.makespan else 0.0


def timeline(schedule: Schedule, costs: Costs) -> Timeline:
    """Run ``schedule``: each action as soon as its rank is free and what it needs has arrived.

    Two that run together begin when both can, take the time of both, and end together. Raises ScheduleError where ranks
    would wait for each other for ever.
    """
    ends: dict[Action, float] = {}
    start: dict[Action, float] = {}
    steps = [list(schedule.steps(rank)) for rank in range(len(schedule.rows))]
    done, free = [0] * len(steps), [0.0] * len(steps)
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(steps):
            while done[rank] < len(own):
                step = own[done[rank]]
                needed = [each for action in step for each in schedule.needs(action)]
                if any(each not in ends for each in needed):
                    break
                arrivals = [ends[each] + costs.transfer * (schedule.rank_of[each.stage] != rank) for each in needed]
                for action in step:
                    start[action] = max(free[rank], *arrivals) if arrivals else free[rank]
                    free[rank] = start[action] + costs.of(action)
                ends.update(dict.fromkeys(step, free[rank]))
                done[rank] += 1
                moved = True
    waiting = {rank: own[done[rank]] for rank, own in enumerate(steps) if done[rank] < len(own)}
    if waiting:
        raise ScheduleError(
            "ranks wait for each other: " + "; ".join(_waits(schedule, ends, *w) for w in waiting.items())
        )
    return Timeline(schedule, costs, start)


def _waits(schedule: Schedule, ends: Mapping[Action, float], rank: int, step: tuple[Action, ...]) -> str:
    pairs = ((action, each) for action in step for each in schedule.needs(action))
    action, missing = next((action, each) for action, each in pairs if each not in ends)
    where = schedule.cells.get(missing)
    found = f"cell {where[1]} of rank {where[0]}" if where else "in no cell"
    return f"rank {rank} in cell {schedule.cells[action][1]} ({action}) for {missing} ({found})"
