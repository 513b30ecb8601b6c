"""Recomputation as an action of schedules: where it stands, what it frees, what it costs, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ds_npu.config.pipeline import PipelineSection
from ds_npu.config.problems import ConfigError
from ds_npu.features.pipeline.layout import layout_of
from ds_npu.parallel.pipeline.fill import recomputed
from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule, ScheduleError, from_csv, to_csv
from ds_npu.parallel.pipeline.schedules import SCHEDULES
from ds_npu.parallel.pipeline.timeline import Costs, check_schedule, timeline
from ds_npu.planner.schedule_picture import schedule_svg, schedule_text

SIZES = ((2, 1), (2, 5), (3, 7), (4, 4), (4, 16), (8, 17))


def every_schedule():
    for (name, each), (ranks, count) in itertools.product(SCHEDULES.items(), SIZES):
        yield name, each.make(ranks, max(count, each.fewest_micro_batches(ranks)), each.chunks or 2)


def inside_backwards(schedule: Schedule) -> float:
    """The makespan where each backward (for inputs) computes its forward again itself, when its gradient is there."""
    return timeline(schedule, Costs(backward_input=2.0)).makespan


def test_every_schedule_with_recomputation():
    for name, plain in every_schedule():
        times = [timeline(plain, Costs()).makespan]
        for ahead in (1, 0):
            schedule = recomputed(plain, ahead)
            check_schedule(schedule)
            others = [[each for each in row if each.kind is not Kind.RECOMPUTE] for row in schedule.rows]
            assert Schedule.of(others) == plain, name
            times.append(timeline(schedule, Costs()).makespan)
            for rank, row in enumerate(plain.rows):
                again = {each[::2] for each in schedule.rows[rank] if each.kind is Kind.RECOMPUTE}
                at_once = {
                    each[::2]
                    for each, following in itertools.pairwise(row)
                    if each.kind is Kind.FORWARD
                    and following[::2] == each[::2]
                    and following.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
                }
                assert again == {each[::2] for each in row} - at_once, name
        inline = recomputed(plain).peak_activations
        assert all(found <= whole for found, whole in zip(inline, plain.peak_activations, strict=True)), name
        moved = recomputed(plain, 1).peak_activations
        assert all(found <= least + 1 for found, least in zip(moved, inline, strict=True)), name
        assert times == sorted(times) and times[-1] <= inside_backwards(plain), (name, times)


@pytest.mark.parametrize(
    ("name", "makespans", "peaks"),
    [
        ("gpipe", (57, 73, 73, 76), (16, 1, 2)),
        ("1f1b", (57, 70, 71, 76), (4, 1, 2)),
        ("zb_h1", (51, 66, 66, 70), (4, 4, 4)),
        ("v_min", (107, 134, 139, 201), (4, 2, 3)),
    ],
)
def test_what_four_ranks_and_sixteen_micro_batches_come_to(name, makespans, peaks):
    """Without, moved, just in time, inside of backwards; most activations without, just in time, moved."""
    plain = SCHEDULES[name].make(4, 16, 2)
    every = (plain, recomputed(plain, 1), recomputed(plain))
    assert (*(timeline(each, Costs()).makespan for each in every), inside_backwards(plain)) == makespans
    assert (max(plain.peak_activations), max(every[2].peak_activations), max(every[1].peak_activations)) == peaks


def test_where_a_recomputation_stands():
    plain = SCHEDULES["1f1b"].make(2, 3, 1)
    assert to_csv(recomputed(plain)) == "0F0,0F1,0R0,0B0,0F2,0R1,0B1,0R2,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert from_csv(to_csv(recomputed(plain, 1))) == recomputed(plain, 1)
    assert to_csv(recomputed(plain, 1)).splitlines()[0] == "0F0,0F1,0R0,0R1,0B0,0F2,0B1,0R2,0B2"


def test_it_is_in_the_picture():
    run = timeline(recomputed(SCHEDULES["1f1b"].make(2, 2, 1)), Costs())
    assert "R0" in schedule_text("1f1b", run) and "forward again" in schedule_svg("1f1b", run)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("0R0,0F0,0B0", r"rank 0, cell 0 \(0R0\): stands before 0F0, which it needs"),
        ("0F0,0B0,0R0", r"rank 0, cell 1 \(0B0\): stands before 0R0, which it needs"),
        ("0F0,0I0,0R0,0W0", r"rank 0, cell 1 \(0I0\): stands before 0R0, which it needs"),
        ("0F0,0R0,0R0,0B0", r"rank 0, cell 2 \(0R0\): stands twice"),
        ("0F0,0R0", r"stage 0, micro-batch 0: needs a whole backward \(B\) or both its parts"),
        ("0F0,0B0\n0R0", r"rank 1, cell 0 \(0R0\): stage 0 is on rank 0"),
    ],
)
def test_broken_ones_name_the_cell(rows, said):
    with pytest.raises(ScheduleError, match=said):
        check_schedule(from_csv(rows))


def test_layouts_recompute_as_the_section_says(tmp_path: Path):
    plain = layout_of(PipelineSection(schedule="zb_v"), 2)
    assert not plain.recomputes
    for asked, ahead in (("inline", 0), ("bubble", 1)):
        layout = layout_of(PipelineSection(schedule="zb_v", recompute=asked), 2)
        assert layout.recomputes and layout.make(5) == recomputed(plain.make(5), ahead)
        assert layout.forwards(3) == plain.forwards(3)
    file = tmp_path / "own.csv"
    file.write_text(to_csv(recomputed(SCHEDULES["1f1b"].make(2, 4, 1))))
    assert Action(0, Kind.RECOMPUTE, 3) in layout_of(PipelineSection(schedule=str(file)), 2).make(4).cells
    with pytest.raises(ConfigError, match=r'pipeline\.recompute: found "inline"; nothing beside .* recomputations'):
        layout_of(PipelineSection(schedule=str(file), recompute="inline"), 2)
