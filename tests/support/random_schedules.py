"""Random pipeline schedules that can run: any stages on any rank, whole or split backwards, forwards that run again."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import strategies as st

from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule

F, B, W, R = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE
INPUT = Kind.BACKWARD_INPUT


def needed(action: Action, last: int) -> Iterator[set[Action]]:
    """Of what must have run before ``action``, sets of each of which one is enough; not by ``Schedule.needs``."""
    stage, kind, index = action
    if kind is F and stage > 0:
        yield {Action(stage - 1, F, index)}
    if kind in (R, B, INPUT):
        yield {Action(stage, F, index)}
    if kind is W:
        yield {Action(stage, INPUT, index)}
    if kind in (B, INPUT) and stage < last:
        yield {Action(stage + 1, B, index), Action(stage + 1, INPUT, index)}


def runs_to_its_end(schedule: Schedule) -> bool:
    """Whether ranks that run their rows in order, and wait for what they need, come to their ends."""
    done: set[Action] = set()
    rows, places = schedule.rows, [0] * len(schedule.rows)
    every = set(schedule.actions())
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if places[rank] == len(row):
                continue
            action = row[places[rank]]
            again = action._replace(kind=R)
            waits = action.kind in (B, INPUT) and again in every and again not in done
            if not waits and all(each & done for each in needed(action, schedule.stages - 1)):
                done.add(action)
                places[rank] += 1
                moved = True
    return all(place == len(row) for place, row in zip(places, rows, strict=True))


def random_schedule(drawn: random.Random, ranks: int) -> Schedule:
    """Its actions run one after another in an order that is drawn, and stand in their ranks' rows in that order."""
    stages, count = ranks * drawn.randint(1, 2), drawn.randint(1, 4)
    owner = [stage % ranks for stage in range(stages)]
    drawn.shuffle(owner)
    waiting: set[Action] = set()
    for stage in range(stages):
        for index in range(count):
            kinds = [F, *drawn.choice(([B], [INPUT, W])), *([R] if drawn.random() < 0.5 else [])]
            waiting |= {Action(stage, kind, index) for kind in kinds}
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while waiting:
        ready = [
            each
            for each in sorted(waiting, key=str)
            if all(one & done for one in needed(each, stages - 1))
            and not (each.kind in (B, INPUT) and each._replace(kind=R) in waiting)
        ]
        action = drawn.choice(ready)
        waiting.remove(action)
        done.add(action)
        rows[owner[action.stage]].append(action)
    return Schedule.of(rows)


@st.composite
def schedules(draw: st.DrawFn, ranks: int | None = None) -> Schedule:
    """``ranks``: how many, else 1 to 4."""
    count = draw(st.integers(1, 4)) if ranks is None else ranks
    return random_schedule(draw(st.randoms(use_true_random=False)), count)
