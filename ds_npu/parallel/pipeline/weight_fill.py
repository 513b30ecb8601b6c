"""Weight gradients where a rank would wait: the second half of every zero-bubble schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ds_npu.parallel.pipeline.schedule import Action, Kind, Rows, Schedule
from ds_npu.parallel.pipeline.timeline import Clock, Costs


def with_weight_gradients(main: Rows, most_live: int) -> Schedule:
    """Insert a W for every I of ``main`` where its rank would wait, or where the next forward needs the memory.

    ``main``: for each rank its F and I, whose order is kept. No rank keeps activations of more than ``most_live``
    (stage, micro-batch) at a time. Every action takes one unit of time. Source: Qi et al. 2024 (arXiv 2401.10241).
    """
    clock = Clock(Schedule.of(main), Costs())
    return Schedule.of(clock.run([_Rank(clock, row, most_live).next_step for row in main]))


class _Rank:
    """One rank whose row is being made."""

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
