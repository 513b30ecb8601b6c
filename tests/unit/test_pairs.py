"""Schedules whose forwards and backwards run together: they can run, cost no time, and torch reads them."""

from __future__ import annotations

import itertools

import pytest
from torch.distributed.pipelining import schedules as of_torch

from ds_npu.cli.planned_model import pair_lines
from ds_npu.config.check import check
from ds_npu.config.pipeline import PAIRED as NAMES
from ds_npu.config.pipeline import PipelineSection
from ds_npu.config.problems import ConfigError
from ds_npu.features.pipeline.layout import layout_of
from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule, ScheduleError, from_csv, to_csv
from ds_npu.parallel.pipeline.schedules import PAIRED, SCHEDULES, one_f_one_b, paired
from ds_npu.parallel.pipeline.timeline import Costs, check_schedule, timeline

RANKS, MICRO_BATCHES, CHUNKS = (1, 2, 3, 4, 8), (1, 2, 3, 4, 5, 7, 8, 12, 17, 32), (1, 2, 3)


def made(name: str):
    """(ranks, micro-batches, chunks) and the schedule with pairs."""
    for ranks, count, chunks in itertools.product(RANKS, MICRO_BATCHES, CHUNKS if name == "interleaved" else (1,)):
        if count >= SCHEDULES[name].fewest_micro_batches(ranks):
            yield (ranks, count, chunks), PAIRED[name](ranks, count, chunks)


def of_torch_row(line: str) -> list:
    return [of_torch._Action.from_str(cell) for cell in line.split(",")]


@pytest.mark.parametrize("name", NAMES)
def test_they_can_run_and_are_read_as_they_are_written(name):
    assert tuple(PAIRED) == NAMES
    for sizes, schedule in made(name):
        check_schedule(schedule)
        text = to_csv(schedule)
        assert from_csv(text) == schedule
        for rank, line in enumerate(text.splitlines()):
            read = [each.sub_actions or (each,) for each in of_torch_row(line)]
            assert [list(map(str, each)) for each in read] == [list(map(str, each)) for each in schedule.steps(rank)]
        plain = SCHEDULES[name].make(*sizes)
        assert set(plain.actions()) == set(schedule.actions())
        if sizes[1] >= 4 * sizes[0] and sizes[0] > 1:
            # All but those of the beginning and the end.
            assert min(sum(each in schedule.paired for each in row) for row in schedule.rows) >= sizes[1] / 2


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_pairs_take_no_time(name):
    """Though each of a pair begins and ends with the other; a rank keeps up to twice as many activations of 1F1B."""
    for sizes, schedule in made(name):
        plain = SCHEDULES[name].make(*sizes)
        assert timeline(schedule, Costs()).makespan == timeline(plain, Costs()).makespan, sizes
        most = 2 * sizes[0] if name == "1f1b" else max(plain.peak_activations) + 1
        assert max(schedule.peak_activations) <= most, sizes


def test_pairs_of_dual_pipe_take_little():
    for (ranks, *sizes), schedule in made("dualpipe_v"):
        plain = SCHEDULES["dualpipe_v"].make(ranks, *sizes)
        lost = timeline(schedule, Costs()).makespan - timeline(plain, Costs()).makespan
        assert lost <= max(ranks - 1, 0), (ranks, sizes)
        assert schedule.peak_activations == plain.peak_activations


def test_pairs_of_plain_1f1b_would_take_turns_over_ranks():
    """Why 1F1B's ranks keep more micro-batches where they have pairs."""
    plain = one_f_one_b(4, 16)
    assert timeline(paired(plain, False), Costs()).makespan > 1.5 * timeline(plain, Costs()).makespan


F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,(0F1;0B1)OVERLAP_F_B,0B0", "0F1 and 0B1 run together; a forward and a backward of other micro-batches"),
        ("(0F0;0F1)OVERLAP_F_B,0B0,0B1", "0F0 and 0F1 run together"),
        ("0F0,(0F1;0B0,0B1", r"row 0, cell 1: found '\(0F1;0B0'; an action is a stage"),
        # Each rank's pair needs the other's.
        (
            "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1",
            r"ranks wait for each other: rank 0 in cell 2 \(0B0\) for 1B0 .*; rank 1 in cell 1 \(1F1\) for 0F1",
        ),
    ],
)
def test_pairs_that_cannot_run(text, said):
    with pytest.raises(ScheduleError, match=said):
        check_schedule(from_csv(text))
    with pytest.raises(ScheduleError, match="run together"):
        check_schedule(Schedule.of([[Action(0, F, 0), Action(0, B, 0)]], [Action(0, B, 0)]))


def test_the_key_and_a_file_ask_for_them(tmp_path):
    asked = PipelineSection(overlap_experts=True, schedule="interleaved", virtual_stages=2)
    assert layout_of(asked, 2).make(8) == PAIRED["interleaved"](2, 8, 2)
    assert layout_of(PipelineSection(overlap_experts=True), 4).make(8) == PAIRED["1f1b"](4, 8, 1)
    few = layout_of(PipelineSection(overlap_experts=True, schedule="dualpipe_v"), 4)
    assert few.make(8).paired and not few.make(3).paired
    file = tmp_path / "pairs.csv"
    file.write_text(to_csv(PAIRED["1f1b"](2, 4, 1)))
    assert layout_of(PipelineSection(schedule=str(file)), 2).make(4) == PAIRED["1f1b"](2, 4, 1)
    with pytest.raises(ValueError, match="in which forwards and backwards run together"):
        layout_of(PipelineSection(schedule=str(file), recompute="inline"), 2)
    assert not list(pair_lines(SCHEDULES["1f1b"].make(2, 4, 1)))
    (line,) = pair_lines(PAIRED["1f1b"](2, 4, 1))
    assert line.startswith("Together: 4 of 8 forwards run beside a backward")


REFUSED = [
    ({"pipeline": {"schedule": "zb_v"}}, "ds_npu.pipeline.schedule", "1f1b, interleaved, dualpipe_v with"),
    ({"pipeline": {"schedule": "own.csv"}}, "ds_npu.pipeline.schedule", "a file has pairs of its own"),
    ({"pipeline": {"recompute": "inline"}}, "ds_npu.pipeline.recompute", "one forward or backward at a time"),
    ({"moe": {"dispatcher": "fused"}}, "ds_npu.moe.dispatcher", "which leaves it no message"),
    ({"swap": {"activations": True}}, "ds_npu.swap.activations", "one forward or backward at a time"),
    ({"recompute": {"budget_gib": 1}}, "ds_npu.recompute.budget_gib", "one forward or backward at a time"),
    ({"parallel": {"expert": 1}}, "ds_npu.pipeline.overlap_experts", "only with ds_npu.parallel.expert > 1"),
    ({"parallel": {"pipeline": 1}}, "ds_npu.pipeline.overlap_experts", "only with ds_npu.parallel.pipeline > 1"),
]


@pytest.mark.parametrize(("more", "path", "accepted"), REFUSED, ids=str)
def test_what_does_not_go_together_is_refused(more, path, accepted):
    usual = {"parallel": {"pipeline": 2, "expert": 2}, "pipeline": {"overlap_experts": True}}
    section = {key: usual.get(key, {}) | more.get(key, {}) for key in usual | more}
    with pytest.raises(ConfigError) as caught:
        check({"train_micro_batch_size_per_gpu": 8, "ds_npu": section}, 4)
    found = {each.path: each.accepted for each in caught.value.problems}
    assert accepted in found[path], found
