"""The clock of schedules: when each action runs, given the costs of actions; makespan, bubble and deadlocks.

``check_schedule`` validates schedules: every cell on its rank and in order, every action once, and no deadlock.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ds_npu.parallel.pipeline.schedule import SENDS, Action, Kind, Schedule, ScheduleError


@dataclass(frozen=True)
class Costs:
    """The costs of a stage on one micro-batch, in any unit of time."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0
    """The time from one rank to another, during which both compute."""
    stages: Sequence[float] = ()
    """The factor of each stage's costs; empty: stages are alike."""

    def of(self, action: Action) -> float:
        cost = {
            Kind.BACKWARD: self.backward_input + self.backward_weight,
            Kind.BACKWARD_INPUT: self.backward_input,
            Kind.BACKWARD_WEIGHT: self.backward_weight,
            Kind.SEND_STATES: self.transfer,
            Kind.SEND_GRADIENTS: self.transfer,
        }.get(action.kind, self.forward)
        return cost * self.stages[action.stage] if self.stages and action.kind not in SENDS else cost


class Clock:
    """A simulation of ranks: an action begins on a free rank, once all its inputs have arrived there."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        """``schedule`` has the rank of each stage and the needs of each action; the ranks choose the order."""
        self.schedule, self.costs = schedule, costs
        self.now = 0.0
        self.start: dict[Action, float] = {}
        """The begin of all actions so far, and of the sends of their results, which overlap with computation."""
        self.end: dict[Action, float] = {}
        """The end of all actions so far, and of the receives of their results."""

    def run(self, ranks: Sequence[Callable[[], Sequence[Action]]]) -> list[list[Action]]:
        """Ask each free rank for its next step, at its start, at a step's end and at an arrival; return the rows.

        ``ranks``: for each rank a function that returns the step to begin now: nothing, an action, or two that overlap.
        """
        rows: list[list[Action]] = [[] for _ in ranks]
        free = [0.0 for _ in ranks]
        events = [(0.0, rank) for rank in range(len(ranks))]
        while events:
            self.now, rank = heapq.heappop(events)
            step = ranks[rank]() if free[rank] <= self.now else ()
            if step:
                rows[rank] += step
                free[rank] = self.begin(step, self.now)
                heapq.heappush(events, (free[rank], rank))
            for _, receive in filter(None, map(self.schedule.transfers.get, step)):
                heapq.heappush(events, (self.end[receive], self.schedule.rank_of[receive.stage]))
        return rows

    def begin(self, step: Sequence[Action], at: float) -> float:
        """Run ``step`` from ``at`` on, and return its end: two actions end at once, after the sum of their costs."""
        for action in step:
            self.start[action] = at
            at += self.costs.of(action)
        self.end.update(dict.fromkeys(step, at))
        for send, receive in filter(None, map(self.schedule.transfers.get, step)):
            self.start[send], self.end[receive] = at, at + self.costs.of(send)
        return at

    def arrival(self, action: Action) -> float:
        """The time when the last input of ``action`` is on its rank; infinity where one has not begun."""
        ends, transfers = [0.0], self.schedule.transfers
        for needed in self.schedule.needs(action):
            crosses = needed.stage != action.stage and needed in transfers
            ends.append(self.end.get(transfers[needed][1] if crosses else needed, math.inf))
        return max(ends)

    def has_arrived(self, *actions: Action) -> bool:
        """Whether all inputs of ``actions`` are on their rank now."""
        return all(self.arrival(each) <= self.now for each in actions)


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
        """The time from the first action of any rank to the end of the last one."""
        return max((self.end(row[-1]) for row in self.schedule.rows if row), default=0.0)

    @property
    def bubble(self) -> float:
        """The longest time that a rank waits between its first and its last action.

        Only this counts where each rank's optimizer steps without waiting for the others. Source: Qi et al. 2024 (arXiv
        2401.10241), whose formulas count it so.
        """
        return max((self._waits(rank) for rank in range(len(self.schedule.rows))), default=0.0)

    def _waits(self, rank: int) -> float:
        row = self.schedule.rows[rank]
        return self.end(row[-1]) - self.start[row[0]] - self.work(rank) if row else 0.0

    def work(self, rank: int) -> float:
        """The time that all actions of ``rank`` take."""
        return sum(map(self.costs.of, self.schedule.rows[rank]))

    def idle(self, rank: int) -> float:
        """The part of the makespan in which ``rank`` does nothing, from 0 to 1."""
        return 1 - self.work(rank) / self.makespan if self.makespan else 0.0


def timeline(schedule: Schedule, costs: Costs) -> Timeline:
    """Run ``schedule``: each action as soon as its rank is free and its inputs have arrived.

    Two that overlap begin when both can. Raises ScheduleError where ranks would wait for each other for ever.
    """
    clock = Clock(schedule, costs)
    steps = [deque(schedule.steps(rank)) for rank in range(len(schedule.rows))]

    def following(own: deque[tuple[Action, ...]]) -> tuple[Action, ...]:
        return own.popleft() if own and clock.has_arrived(*own[0]) else ()

    clock.run([partial(following, own) for own in steps])
    waiting = {rank: own[0] for rank, own in enumerate(steps) if own}
    if waiting:
        raise ScheduleError(
            "ranks wait for each other: " + "; ".join(_waits(schedule, clock.end, *w) for w in waiting.items())
        )
    return Timeline(schedule, costs, clock.start)


def _waits(schedule: Schedule, ends: Mapping[Action, float], rank: int, step: tuple[Action, ...]) -> str:
    pairs = ((action, each) for action in step for each in schedule.needs(action))
    action, missing = next((action, each) for action, each in pairs if each not in ends)
    where = schedule.cells.get(missing)
    found = f"cell {where[1]} of rank {where[0]}" if where else "in no cell"
    return f"rank {rank} in cell {schedule.cells[action][1]} ({action}) for {missing} ({found})"


def check_schedule(schedule: Schedule) -> None:
    """Raise ScheduleError, with every cell at fault or the ranks that would wait for each other."""
    problems = [*_wrong_cells(schedule), *_wrong_pairs(schedule), *_missing(schedule)]
    if problems:
        raise ScheduleError("; ".join(problems))
    timeline(schedule, Costs())


def _wrong_cells(schedule: Schedule) -> Iterator[str]:
    owner: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            where = f"rank {rank}, cell {index} ({action})"
            first = owner.setdefault(action.stage, rank)
            if first != rank:
                yield f"{where}: stage {action.stage} is on rank {first}"
            if action in seen:
                yield f"{where}: stands twice"
            seen.add(action)
            before = [each for each in schedule.needs(action) if each.stage == action.stage]
            missing = [each for each in before if each in schedule.cells and each not in seen]
            if missing:
                yield f"{where}: stands before {missing[0]}, which it needs"


def _wrong_pairs(schedule: Schedule) -> Iterator[str]:
    for rank in range(len(schedule.rows)):
        for step in schedule.steps(rank):
            kinds = [each.kind for each in step]
            goes = kinds[0] is Kind.FORWARD and kinds[-1] in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
            is_pair = len(step) == 2 and goes and step[0].micro_batch != step[1].micro_batch
            if step[0] in schedule.paired and not is_pair:
                found = " and ".join(map(str, step))
                yield f"rank {rank}: {found} run together; a forward and a backward of other micro-batches do"


def _missing(schedule: Schedule) -> Iterator[str]:
    cells = schedule.cells
    for stage in range(schedule.stages):
        for micro_batch in range(schedule.micro_batches):
            has = {kind: Action(stage, kind, micro_batch) in cells for kind in Kind}
            where = f"stage {stage}, micro-batch {micro_batch}"
            if not has[Kind.FORWARD]:
                yield f"{where}: has no forward (F)"
            parts = has[Kind.BACKWARD_INPUT], has[Kind.BACKWARD_WEIGHT]
            if has[Kind.BACKWARD] == any(parts) or any(parts) != all(parts):
                found = ", ".join(kind.value for kind, is_there in has.items() if is_there) or "none"
                yield f"{where}: needs a whole backward (B) or both its parts (I and W), and has {found}"
