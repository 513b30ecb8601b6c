"""Schedules and their times are those that four separate simulations made, before there was one clock."""

from __future__ import annotations

import hashlib
import itertools

import pytest

from ds_npu.parallel.pipeline.fill import recomputed
from ds_npu.parallel.pipeline.schedule import Schedule, to_csv
from ds_npu.parallel.pipeline.schedules import SCHEDULES
from ds_npu.parallel.pipeline.timeline import Costs, timeline

RECORDED = {
    "gpipe": "605686534f033290",
    "1f1b": "948bfe2a65f4b204",
    "interleaved": "b34225bf71957b4a",
    "zb_h1": "08af60c5a857ecfa",
    "zb_h2": "18a8b3903d5e3a51",
    "zb_v": "8cacec65bfa32620",
    "v_half": "c0375ab7cd600948",
    "v_min": "233917ca842ee931",
    "dualpipe_v": "c121b3661d87f74e",
}
"""SHA-256 of what ``written`` said in commit 9fb6e85."""


def costs(stages: int) -> tuple[Costs, ...]:
    unequal = [0.1 + 0.37 * (stage % 5) for stage in range(stages)]
    return Costs(), Costs(2.0, 3.0, 1.5, 0.7), Costs(1.1, 0.9, 0.3, 0.25, unequal), Costs(0.0, 1.0, 0.0, 0.1)


def times(schedule: Schedule) -> str:
    runs = [timeline(schedule, each) for each in costs(schedule.stages)]
    return repr([[run.start[action] for action in schedule.actions()] for run in runs])


def written(name: str):
    """Text of schedules of many sizes, without and with recomputation, and of their times."""
    named = SCHEDULES[name]
    for ranks, count in itertools.product((1, 2, 3, 4, 6), (1, 3, 5, 8, 13)):
        if count >= named.fewest_micro_batches(ranks):
            plain = named.make(ranks, count, named.chunks or 3)
            ahead = recomputed(plain, 2)
            yield from (to_csv(plain), to_csv(recomputed(plain, 1)), to_csv(ahead))
            if count == 5:
                yield from (times(plain), times(ahead))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_and_times_are_as_recorded(name):
    assert hashlib.sha256("".join(written(name)).encode()).hexdigest()[:16] == RECORDED[name]
