"""Pipeline schedules against their papers' formulas, torch's own checker, and random ones that can or cannot run."""

from __future__ import annotations

import itertools
import random
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as of_torch

from ds_npu.config.pipeline import MOST_STAGES
from ds_npu.parallel.pipeline.schedule import (
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Schedule,
    ScheduleError,
    from_csv,
    to_csv,
)
from ds_npu.parallel.pipeline.schedules import PAIRED, SCHEDULES
from ds_npu.parallel.pipeline.timeline import Costs, check_schedule, timeline
from ds_npu.planner.schedule_picture import schedule_svg, schedule_text

RANKS = (1, 2, 3, 4, 5, 8)


def made(name: str, ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    named = SCHEDULES[name]
    return named.make(ranks, micro_batches, named.chunks or chunks)


def run(name: str, ranks: int, micro_batches: int, chunks: int = 2):
    """Where a rank's stages together cost 1 for each of F, I and W."""
    schedule = made(name, ranks, micro_batches, chunks)
    share = ranks / schedule.stages
    return timeline(schedule, Costs(share, share, share))


def torch_runs(schedule: Schedule) -> None:
    """Torch's passes add transfers to the same cells, and its simulation ends: it raises where ranks wait for ever."""
    order = {rank: [of_torch._Action.from_str(str(action)) for action in row] for rank, row in enumerate(schedule.rows)}
    with_transfers = of_torch._add_send_recv(order, schedule.rank_of.__getitem__, schedule.stages)
    of_torch._simulate_comms_compute(with_transfers, schedule.rank_of.__getitem__, schedule.stages)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_run(name):
    for ranks, more in itertools.product(RANKS, (0, 1, 2, 5)):
        micro_batches = max(1 + more * 3, SCHEDULES[name].fewest_micro_batches(ranks))
        schedule = made(name, ranks, micro_batches, chunks=2 + more % 2)
        check_schedule(schedule)
        torch_runs(schedule)
        assert (schedule.micro_batches, len(schedule.rows)) == (micro_batches, ranks)
        assert from_csv(to_csv(schedule)) == schedule


def test_names_and_stages_of_the_section():
    assert {name: each.chunks for name, each in SCHEDULES.items() if each.chunks} == MOST_STAGES


@pytest.mark.parametrize("ranks", RANKS[1:])
@pytest.mark.parametrize("times", [2, 4])
def test_bubbles_and_activations_are_those_of_the_papers(ranks, times):
    """With F = I = W = 1 and activations in halves of a rank's share where it has two stages."""
    micro_batches = times * ranks
    expected = {
        "gpipe": (3 * (ranks - 1), micro_batches),
        # Qi et al. 2024 (arXiv 2401.10241), table 2: (p-1)(F+I+W), (p-1)(F+I-W), (p-1)(F+I-2W).
        "1f1b": (3 * (ranks - 1), ranks),
        "zb_h1": (ranks - 1, ranks),
        "zb_h2": (0, 2 * ranks - 1),
        "zb_v": (0, 2 * ranks),
        # Narayanan et al. 2021 (arXiv 2104.04473), section 2.2: 1F1B's over the stages of a rank.
        "interleaved": (3 * (ranks - 1) / 2, 3 * ranks - 1),
    }
    for name, (bubble, peak) in expected.items():
        found = run(name, ranks, micro_batches)
        assert abs(found.bubble - bubble) < 1e-9, (name, found.bubble, bubble)
        assert max(found.schedule.peak_activations) == peak, name
        assert found.makespan <= 3 * micro_batches + max(bubble, ranks - 1) + 1e-9, name


def test_1f1b_with_other_costs():
    """(p-1)(F+I+W), at costs that differ."""
    found = timeline(made("1f1b", 4, 12), Costs(2.0, 3.0, 1.5))
    assert found.bubble == 3 * 6.5 and found.makespan == 15 * 6.5


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 8, 10])
def test_v_shapes_keep_a_half_and_a_third_of_1f1b(ranks):
    """Qi et al. 2024 (arXiv 2405.15362): 1/2 + 1/P and 1/3 + 2/(3P) of 1F1B's activations, rounded up to whole ones."""
    micro_batches = 3 * ranks
    half, least = run("v_half", ranks, micro_batches), run("v_min", ranks, micro_batches)
    assert max(half.schedule.peak_activations) <= ranks + 2 + ranks % 2
    assert max(least.schedule.peak_activations) <= -(-2 * (ranks + 4) // 3)
    assert half.bubble <= 3 * (ranks - 1) / 2 and least.bubble <= 3 * (ranks - 1)


def test_transfers_take_time_beside_computation():
    run = timeline(made("gpipe", 2, 1), Costs(transfer=0.5))
    assert run.makespan == 3 * 2 + 2 * 0.5
    sent = {f"{each}": (begin, run.end(each)) for each, begin in run.start.items() if each.kind in SENDS}
    assert sent == {"0SEND_F0": (1.0, 1.5), "1SEND_B0": (4.5, 5.0)}


def test_transfers_are_printed():
    assert to_csv(made("1f1b", 2, 2).with_transfers).splitlines() == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
    ]
    assert to_csv(PAIRED["1f1b"](2, 3, 1).with_transfers).splitlines()[1] == (
        "1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1RECV_F2,(1F2;1B1)OVERLAP_F_B,1SEND_B1,1B2,1SEND_B2"
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_transfers_are_those_of_torch(name):
    """Each rank sends and receives what torch's pass makes it send and receive, directly around what it computes."""
    for ranks in (1, 2, 3, 5):
        schedule = made(name, ranks, max(7, SCHEDULES[name].fewest_micro_batches(ranks)))
        rows = schedule.with_transfers.rows
        order = {rank: [of_torch._Action.from_str(f"{each}") for each in row] for rank, row in enumerate(schedule.rows)}
        theirs = of_torch._add_send_recv(order, schedule.rank_of.__getitem__, schedule.stages)
        assert [sorted(map(str, row)) for row in rows] == [sorted(map(str, theirs[rank])) for rank in range(ranks)]
        for rank, row in enumerate(rows):
            assert [each for each in row if each.kind not in SENDS and each.kind not in RECEIVES] == [
                *schedule.rows[rank]
            ]
            for before, each in itertools.pairwise(row):
                if each.kind in SENDS:
                    assert schedule.carried[each] == before
                if before.kind in RECEIVES:
                    assert schedule.source(each) == schedule.carried[before]


class StageOfTorch(of_torch._PipelineStageBase):
    """Enough of a stage for torch's schedules to be made."""

    def __init__(self, ranks: int, stages: int, index: int, v_shape: bool) -> None:
        self.num_stages, self.group_size, self.group_rank, self.stage_index = stages, ranks, 0, index
        self.group = self.submod = self.dw_builder = None
        self.has_backward, self.device = True, "cpu"
        self.stage_index_to_group_rank = {
            stage: min(stage, stages - 1 - stage) if v_shape else stage % ranks for stage in range(stages)
        }

    def _create_grad_recv_info(self, *args):
        return None

    def _prepare_forward_infra(self, *args):
        raise NotImplementedError

    def _prepare_backward_infra(self, *args):
        raise NotImplementedError


def schedule_of_torch(name: str, ranks: int, micro_batches: int) -> Schedule:
    v_shape, stages = "V" in name, 2 * ranks
    own = (0, stages - 1) if v_shape else (0, ranks)
    given = [StageOfTorch(ranks, stages, index, v_shape) for index in own]
    order = getattr(of_torch, name)(given, micro_batches, loss_fn=sum).pipeline_order
    cells = [[each for action in row if action for each in action.sub_actions or (action,)] for row in order.values()]
    return from_csv("\n".join(",".join(map(str, row)) for row in cells))


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("zb_v", "ScheduleZBVZeroBubble"),
        ("dualpipe_v", "ScheduleDualPipeV"),
        ("interleaved", "ScheduleInterleaved1F1B"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_not_slower_and_not_larger_than_torch(name, theirs, ranks):
    other = schedule_of_torch(theirs, ranks, 3 * ranks)
    check_schedule(other)
    ours, other_run = run(name, ranks, 3 * ranks), timeline(other, Costs(0.5, 0.5, 0.5))
    assert ours.makespan <= other_run.makespan + 1e-9 and ours.bubble <= other_run.bubble + 1e-9
    assert max(ours.schedule.peak_activations) <= max(other.peak_activations)


# ---- what can run, and what cannot ----


@st.composite
def random_schedules(draw) -> Schedule:
    """Any order in which one process could run all actions, each stage's cells given to a rank."""
    stages, micro_batches = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    ranks = [draw(st.integers(0, stages - 1)) for _ in range(stages)]
    split = {each: draw(st.booleans()) for each in itertools.product(range(stages), range(micro_batches))}
    actions = []
    for (stage, index), is_split in split.items():
        kinds = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if is_split else (Kind.BACKWARD,)
        actions += [Action(stage, kind, index) for kind in (Kind.FORWARD, *kinds)]
    whole, chance = Schedule.of([actions]), random.Random(draw(st.integers()))
    rows: list[list[Action]] = [[] for _ in range(stages)]
    done: set[Action] = set()
    while len(done) < len(actions):
        ready = [each for each in actions if each not in done and done.issuperset(whole.needs(each))]
        action = chance.choice(ready)
        rows[ranks[action.stage]].append(action)
        done.add(action)
    return Schedule.of([row for row in rows if row])


@settings(max_examples=100, deadline=None)
@given(random_schedules())
def test_random_schedules_run(schedule):
    check_schedule(schedule)
    found = timeline(schedule, Costs())
    assert found.makespan >= max(len(row) for row in schedule.rows)
    for action, start in found.start.items():
        assert all(found.end(each) <= start for each in schedule.needs(action))


@settings(max_examples=100, deadline=None)
@given(random_schedules(), st.data())
def test_broken_schedules_are_refused_with_the_cell(schedule, data):
    rows = [list(row) for row in schedule.rows]
    rank = data.draw(st.integers(0, len(rows) - 1))
    index = data.draw(st.integers(0, len(rows[rank]) - 1))
    action = rows[rank][index]
    how = data.draw(st.sampled_from(("leave out", "twice", "first last")))
    if how == "leave out":
        del rows[rank][index]
    elif how == "twice":
        rows[rank].insert(index, action)
    elif action.kind is Kind.FORWARD:
        rows[rank].append(rows[rank].pop(index))
    else:
        rows[rank].insert(0, rows[rank].pop(index))
        index = 0
    with pytest.raises(ScheduleError) as refused:
        check_schedule(Schedule.of(rows))
    said = str(refused.value)
    assert (
        str(action) in said
        or f"stage {action.stage}, micro-batch {action.micro_batch}" in said
        or (how == "leave out" and "has no" in said)
    )


def test_ranks_that_wait_for_each_other_are_named():
    broken = from_csv("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n")
    check_schedule(broken)
    with pytest.raises(ScheduleError, match=r"rank 0 in cell 1 \(0B0\) for 1B0 \(cell 2 of rank 1\); rank 1 in cell 0"):
        check_schedule(from_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n"))
    with pytest.raises(ScheduleError, match="row 1, cell 0: found '1X0'"):
        from_csv("0F0\n1X0\n")
    with pytest.raises(ScheduleError, match=r"rank 1, cell 1 \(0B0\): stage 0 is on rank 0"):
        check_schedule(from_csv("0F0\n1F0,0B0,1B0\n"))


def test_pictures():
    zb_h1 = timeline(made("zb_h1", 2, 2), Costs())
    assert schedule_text("zb_h1", zb_h1).splitlines() == [
        "zb_h1: 2 ranks with 1 stage each, 2 micro-batches; time 7, a rank waits at most 1 (16.7% of the work) between "
        "its first and last action",
        "rank 0   F0 F1 ...I0 W0 I1 W1",
        "rank 1   ...F0 I0 F1 I1 W0 W1",
    ]
    drawn = ElementTree.fromstring(schedule_svg("zb_h1", zb_h1))
    texts = [each.text for each in drawn.iter() if each.tag.endswith("text")]
    assert [text for text in texts if text in ("0", "1")] == [*"010011", *"001101"]
    assert {"gradient of inputs", "gradient of weights", "forward", "rank 1"} <= set(texts)


def test_messages_are_drawn():
    drawn = ElementTree.fromstring(schedule_svg("zb_h1", timeline(made("zb_h1", 2, 2), Costs(transfer=0.5))))
    titles = [each.text for each in drawn.iter() if each.tag.endswith("title")]
    assert titles == [
        *("0SEND_F0 to rank 1", "0SEND_F1 to rank 1"),
        *("1SEND_B0 to rank 0", "1SEND_B1 to rank 0"),
    ]
    lines = [each for each in drawn.iter() if each.tag.endswith("line")]
    assert all(float(each.get("x2")) - float(each.get("x1")) == 12 for each in lines) and len(lines) == 4
    assert {"states sent", "gradients sent"} <= {each.text for each in drawn.iter()}
