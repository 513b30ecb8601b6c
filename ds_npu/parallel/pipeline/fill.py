"""Insert actions where a rank would wait: weight gradients (as every zero-bubble schedule does) and recomputation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

from ds_npu.parallel.pipeline.schedule import BACKWARDS, Action, Kind, Rows, Schedule
from ds_npu.parallel.pipeline.timeline import Clock, Costs


def with_weight_gradients(main: Rows, most_live: int) -> Schedule:
    """Insert a W for every I of ``main`` where its rank would wait, or where the next forward needs the memory.

    ``main``: for each rank its F and I, whose order is kept. No rank keeps activations of more than ``most_live``
    (stage, micro-batch) at a time. Every action takes one unit of time. Source: Qi et al. 2024 (arXiv 2401.10241).
    """
    clock = Clock(Schedule.of(main), Costs())
    return Schedule.of(clock.run([_WeightFill(clock, row, most_live).next_step for row in main]))


class _WeightFill:
    """One rank whose row is being made: its F and I, and a W for each I."""

    def __init__(self, clock: Clock, main: Sequence[Action], most_live: int) -> None:
        self.clock, self.main, self.most_live = clock, deque(main), most_live
        self.weights: deque[Action] = deque()
        self.live = 0

    def next_step(self) -> tuple[Action, ...]:
        """The action that begins now; none where the rank waits."""
        is_full = self.live >= self.most_live and self.main and self.main[0].kind is Kind.FORWARD
        if self.main and not is_full and self.clock.has_arrived(self.main[0]):
            action = self.main.popleft()
        elif self.weights:
            action = self.weights.popleft()
        else:
            return ()
        self.live += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD_WEIGHT)
        if action.kind is Kind.BACKWARD_INPUT:
            self.weights.append(action._replace(kind=Kind.BACKWARD_WEIGHT))
        return (action,)


def recomputed(schedule: Schedule, most_ahead: int = 0) -> Schedule:
    """Insert an R for every backward of ``schedule``, whose other actions keep their order.

    The R runs directly before its backward, while the gradient is on its way; or earlier, where the rank would wait, as
    long as the rank then keeps activations of at most ``most_ahead`` (stage, micro-batch) more than with every R
    directly before its backward. A backward right after its forward gets no R: it would free nothing.
    Source: MindSpeed's recompute-in-advance and recompute-in-bubble (ripipe_schedules.py), here for every schedule.
    """
    inline = Schedule.of([list(_with_inline(row)) for row in schedule.rows])
    if most_ahead == 0:
        return inline
    clock = Clock(schedule, Costs())
    most_live = [peak + most_ahead for peak in inline.peak_activations]
    ranks = [_RecomputeFill(clock, *each) for each in zip(schedule.rows, inline.rows, most_live, strict=True)]
    return Schedule.of(clock.run([rank.next_step for rank in ranks]))


def _again(action: Action) -> Action:
    """The R of the forward or backward ``action``."""
    return action._replace(kind=Kind.RECOMPUTE)


def _with_inline(row: Sequence[Action]) -> Iterator[Action]:
    for index, action in enumerate(row):
        if action.kind in BACKWARDS and row[index - 1] != action._replace(kind=Kind.FORWARD):
            yield _again(action)
        yield action


class _RecomputeFill:
    """One rank whose row is being made: its actions, and their R."""

    def __init__(self, clock: Clock, main: Sequence[Action], inline: Sequence[Action], most_live: int) -> None:
        """``main``: the rank's row without recomputation; ``inline``: with each R directly before its backward."""
        self.clock, self.main, self.most_live = clock, list(main), most_live
        self.waiting = [each for each in inline if each.kind is Kind.RECOMPUTE]
        """The R that have not run, in the order of their backwards."""
        self.recomputes = set(self.waiting)
        self.live = 0

    def next_step(self) -> tuple[Action, ...]:
        """The action that begins now; none where the rank waits."""
        action = self._chosen()
        if action is None:
            return ()
        (self.waiting if action.kind is Kind.RECOMPUTE else self.main).remove(action)
        self.live += self._change(action)
        return (action,)

    def _change(self, action: Action) -> int:
        """How ``action`` changes the number of micro-batches whose activations the rank keeps: -1, 0 or 1."""
        keeps = action.kind is Kind.FORWARD and _again(action) not in self.recomputes
        return (keeps or action.kind is Kind.RECOMPUTE) - (action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT))

    def _chosen(self) -> Action | None:
        if not self.main:
            return None
        following = self.main[0]
        first = self.waiting[0] if self.waiting else None
        if self.clock.has_arrived(following):
            needs_first = following.kind in BACKWARDS and _again(following) in self.waiting
            return _again(following) if needs_first else following
        if first is None or not self.clock.has_arrived(first):
            return None
        until = next(i for i, each in enumerate(self.main) if each.kind in BACKWARDS and _again(each) == first)
        more_meanwhile = max(accumulate(map(self._change, self.main[:until]), initial=0))
        return first if self.live + more_meanwhile < self.most_live else None
