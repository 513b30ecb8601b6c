"""How blocks are divided over pipeline stages."""

from __future__ import annotations

import itertools
import random

import pytest

from ds_npu.planner.stage_balance import balanced_counts, even_counts


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


def test_positions_at_which_nothing_stands():
    assert even_counts(7, 4, [7]) == [2, 2, 2, 1]
    assert even_counts(6, 4, [0, 7]) == [1, 2, 2, 1]
    with pytest.raises(ValueError, match="found 7 positions for 4 stages"):
        even_counts(6, 4, [3])
    with pytest.raises(ValueError, match="found position 9 of 8"):
        even_counts(7, 4, [9])
