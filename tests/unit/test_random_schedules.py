"""Random schedules: those that can run are accepted, broken ones are refused with the cell at fault."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import runs_to_its_end, schedules

from ds_npu.parallel.pipeline.fill import recomputed
from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule, ScheduleError, from_csv, to_csv
from ds_npu.parallel.pipeline.timeline import check_schedule


@given(schedules())
def test_what_can_run_is_accepted(schedule):
    assert runs_to_its_end(schedule)
    check_schedule(schedule)
    assert from_csv(to_csv(schedule)) == schedule


@given(schedules(), st.integers(0, 3))
def test_recomputation_leaves_it_runnable(schedule, ahead):
    """Whatever the schedule; its own recomputations are left out before."""
    plain = Schedule.of([[each for each in row if each.kind is not Kind.RECOMPUTE] for row in schedule.rows])
    found = recomputed(plain, ahead)
    check_schedule(found)
    assert runs_to_its_end(found)
    least = recomputed(plain).peak_activations
    assert all(each <= most + ahead for each, most in zip(found.peak_activations, least, strict=True))


def refused(rows: list[list[Action]], *named: str) -> None:
    with pytest.raises(ScheduleError) as error:
        check_schedule(Schedule.of(rows))
    for each in named:
        assert each in str(error.value), (each, str(error.value))


@given(schedules(), st.randoms(use_true_random=False))
def test_broken_ones_are_refused_with_the_cell(schedule, drawn: random.Random):
    rows = [list(row) for row in schedule.rows]
    rank = drawn.randrange(len(rows))
    index = drawn.randrange(len(rows[rank]))
    action = rows[rank][index]
    # Twice.
    broken = [list(row) for row in rows]
    broken[rank].append(action)
    refused(broken, f"rank {rank}, cell {len(rows[rank])} ({action}): stands twice")
    # Missing.
    if action.kind is not Kind.RECOMPUTE:
        broken = [list(row) for row in rows]
        del broken[rank][index]
        refused(broken, f"stage {action.stage}, micro-batch {action.micro_batch}: ")
    # On another rank.
    if len(rows) > 1 and sum(each.stage == action.stage for each in rows[rank]) > 1:
        broken = [list(row) for row in rows]
        del broken[rank][index]
        other = (rank + 1) % len(rows)
        broken[other].append(action)
        refused(broken, f"stage {action.stage} is on rank")


@given(schedules(), st.randoms(use_true_random=False))
def test_orders_that_cannot_run_name_who_waits(schedule, drawn: random.Random):
    """Two cells of a row are exchanged: it is refused where, and only where, some rank would wait for ever."""
    rows = [list(row) for row in schedule.rows]
    rank = drawn.randrange(len(rows))
    one, other = sorted(drawn.randrange(len(rows[rank])) for _ in range(2))
    rows[rank][one], rows[rank][other] = rows[rank][other], rows[rank][one]
    changed = Schedule.of(rows)
    if runs_to_its_end(changed):
        check_schedule(changed)
        return
    with pytest.raises(ScheduleError, match=rf"rank {rank}, cell \d+ \(|rank \d+ in cell \d+ \(\d+[FBIWR]\d+\) for "):
        check_schedule(changed)
