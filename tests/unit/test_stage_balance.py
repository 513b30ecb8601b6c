"""How blocks are divided over pipeline stages."""

from __future__ import annotations

import itertools
import random

import pytest

from ds_npu.config.pipeline import PipelineSection
from ds_npu.features.pipeline.layout import layout_of
from ds_npu.parallel.pipeline.schedules import SCHEDULES
from ds_npu.parallel.pipeline.timeline import Costs, timeline
from ds_npu.planner.stage_balance import balanced_counts, counts_by_rank, even_counts


def slowest(costs: list[float], counts: list[int], behind: float) -> float:
    ends = list(itertools.accumulate(counts))
    loads = [sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    return max([*loads[:-1], loads[-1] + behind])


def test_no_division_has_a_faster_slowest_stage():
    chosen = random.Random(5)
    for _ in range(300):
        costs = [chosen.choice([1.0, 2.0, 3.5]) for _ in range(chosen.randint(1, 6))]
        stages, behind = chosen.randint(1, min(len(costs), 4)), chosen.choice([0.0, 1.0, 4.0])
        found = balanced_counts(costs, stages, behind)
        assert sum(found) == len(costs) and all(count > 0 for count in found[:-1])
        every = [
            counts
            for counts in itertools.product(range(len(costs) + 1), repeat=stages)
            if sum(counts) == len(costs) and all(count > 0 for count in counts[:-1])
        ]
        best = min(slowest(costs, list(counts), behind) for counts in every)
        assert slowest(costs, found, behind) == pytest.approx(best, rel=1e-6), (costs, stages, behind, found)


def test_the_head_takes_the_place_of_blocks():
    assert balanced_counts([1.0] * 32, 4, behind=4.0) == [9, 9, 9, 5]
    assert balanced_counts([1.0] * 8, 4) == [2, 2, 2, 2]
    assert balanced_counts([1.0] * 8, 2, behind=9.0) == [8, 0]
    with pytest.raises(ValueError, match="3 blocks for 4 stages"):
        balanced_counts([1.0] * 3, 4)


def slowest_rank(costs: list[float], counts: list[int], rank_of: list[int], behind: float) -> float:
    ends = list(itertools.accumulate(counts))
    loads = [sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    loads[-1] += behind
    return max(sum(load for load, rank in zip(loads, rank_of, strict=True) if rank == own) for own in rank_of)


def test_several_stages_of_a_rank_share_its_work():
    """Against every division of some; the head is worth several blocks, as that of a large vocabulary."""
    for ranks, blocks, behind in itertools.product(([0, 1, 1, 0], [0, 1, 0, 1]), (7, 12), (0.0, 1.5, 5.6)):
        found = counts_by_rank([1.0] * blocks, ranks, [3.0] * 4, behind)
        every = [
            [*counts, blocks - sum(counts)]
            for counts in itertools.product(range(1, blocks), repeat=3)
            if sum(counts) <= blocks
        ]
        best = min(slowest_rank([1.0] * blocks, counts, ranks, behind) for counts in every)
        assert sum(found) == blocks
        assert slowest_rank([1.0] * blocks, found, ranks, behind) == pytest.approx(best), (ranks, blocks, behind, found)
    assert max(counts_by_rank([1.0] * 24, [0, 1, 2, 3, 3, 2, 1, 0], [3.0] * 8, 9.0)) == 4
    assert counts_by_rank([1.0] * 32, [0, 1, 2, 3], [3.0] * 4, 4.0) == [9, 9, 9, 5]


def test_stages_that_run_their_forwards_again_have_fewer_blocks():
    assert counts_by_rank([1.0] * 15, [0, 1], [4.0, 3.0]) == [6, 9]
    section = PipelineSection(schedule="zb_v", recompute="inline")
    assert layout_of(section, 2).work == (4.0, 4.0, 4.0, 3.0)


@pytest.mark.parametrize("name", ["interleaved", "zb_v", "v_half", "dualpipe_v"])
def test_a_schedule_gains_by_it(name):
    """24 blocks and a head worth 9 of them, as a timeline counts it."""
    schedule = SCHEDULES[name].make(4, 16, 2)
    rank_of = [schedule.rank_of[stage] for stage in range(8)]
    spans = []
    for counts in (balanced_counts([1.0] * 24, 8, 9.0), counts_by_rank([1.0] * 24, rank_of, [3.0] * 8, 9.0)):
        stages = [*map(float, counts[:-1]), counts[-1] + 9.0]
        spans.append(timeline(schedule, Costs(stages=stages)).makespan)
    assert spans[1] <= (0.96 if name == "interleaved" else 0.7) * spans[0], spans


def test_positions_at_which_nothing_stands():
    assert even_counts(7, 4, [7]) == [2, 2, 2, 1]
    assert even_counts(6, 4, [0, 7]) == [1, 2, 2, 1]
    with pytest.raises(ValueError, match="found 7 positions for 4 stages"):
        even_counts(6, 4, [3])
    with pytest.raises(ValueError, match="found position 9 of 8"):
        even_counts(7, 4, [9])
