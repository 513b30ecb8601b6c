"""Divides blocks over pipeline stages so that the slowest rank is as fast as it can be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, islice, permutations

ROUNDING, HALVINGS = 1e-9, 60


def counts_by_rank(
    costs: Sequence[float], rank_of: Sequence[int], work: Sequence[float], behind: float = 0.0
) -> list[int]:
    """The number of consecutive blocks of each stage: work is divided evenly over ranks.

    ``rank_of``: the rank of each stage; ``work``: the factor of a stage's costs (more where it runs a forward again);
    ``costs``, ``behind``: as in ``balanced_counts``, whose result is returned where each rank has one stage and all
    factors are equal. Elsewhere single blocks are moved until the slowest rank gets no faster, and then until the sum
    of the squares of the stages' loads is the least. Raises ValueError where there are fewer blocks than stages.
    """
    stages = len(rank_of)
    counts = balanced_counts(costs, stages, behind)
    if stages == len(set(rank_of)) and len(set(work)) == 1:
        return counts
    ends = [0.0, *accumulate(costs)]

    def score(counts: Sequence[int]) -> tuple[float, float]:
        at = [0, *accumulate(counts)]
        loads = [
            (ends[at[stage + 1]] - ends[at[stage]] + behind * (stage == stages - 1)) * work[stage]
            for stage in range(stages)
        ]
        of_ranks = [sum(load for load, rank in zip(loads, rank_of, strict=True) if rank == own) for own in set(rank_of)]
        return max(of_ranks), sum(load * load for load in loads)

    best = score(counts)
    while True:
        found, candidate = min(((score(each), each) for each in _moves(counts)), default=(best, counts))
        if not _is_less(found, best):
            return counts
        best, counts = found, candidate


def _is_less(found: tuple[float, float], best: tuple[float, float]) -> bool:
    """Whether the score ``found`` is less than ``best``, by more than rounding."""
    for one, other in zip(found, best, strict=True):
        if abs(one - other) > ROUNDING * other:
            return one < other
    return False


def _moves(counts: list[int]) -> list[list[int]]:
    """Move one block from a stage to another, in every way; all but the last stage keep one."""
    found = []
    for source, target in permutations(range(len(counts)), 2):
        if counts[source] > (source < len(counts) - 1):
            moved = list(counts)
            moved[source] -= 1
            moved[target] += 1
            found.append(moved)
    return found


def balanced_counts(costs: Sequence[float], stages: int, behind: float = 0.0) -> list[int]:
    """The number of consecutive blocks of each stage, so that the largest sum of ``costs`` is the least.

    ``costs``: of each block, in any unit; ``behind``: the cost of the head, which the last stage computes after its
    blocks. Each stage has a block, except the last one where the head outweighs the blocks. Of equally good numbers,
    earlier stages have the larger. Raises ValueError where there are fewer blocks than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} blocks for {stages} stages, of which each needs a block")
    with_block = _least(costs, stages, behind, fewest_last=1)
    without = _least(costs, stages, behind, fewest_last=0)
    return without if _load(costs, without, behind) < _load(costs, with_block, behind) * (1 - ROUNDING) else with_block


def _least(costs: Sequence[float], stages: int, behind: float, fewest_last: int) -> list[int]:
    """The best numbers where the last stage has at least ``fewest_last`` blocks."""
    low, high = 0.0, sum(costs) + behind
    best = _filled(costs, stages, behind, high, fewest_last)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = _filled(costs, stages, behind, middle, fewest_last)
        if _load(costs, found, behind) <= middle * (1 + ROUNDING):
            best, high = found, middle
        else:
            low = middle
    return best


def _filled(costs: Sequence[float], stages: int, behind: float, most: float, fewest_last: int) -> list[int]:
    """Fill each stage from the first one up to ``most``, leaving a block for each later one; the last has the rest."""
    counts, at = [], 0
    for later in range(stages - 1, 0, -1):
        count, load = 1, costs[at]
        most_blocks = len(costs) - at - max(later - 1, 0) - fewest_last
        while count < most_blocks and load + costs[at + count] <= most * (1 + ROUNDING):
            load += costs[at + count]
            count += 1
        counts.append(count)
        at += count
    return [*counts, len(costs) - at]


def _load(costs: Sequence[float], counts: Sequence[int], behind: float) -> float:
    blocks = iter(costs)
    loads = [sum(islice(blocks, count)) for count in counts]
    return max([*loads[:-1], loads[-1] + behind])


def even_counts(blocks: int, stages: int, idle: Collection[int]) -> list[int]:
    """The blocks in each of ``stages`` equally long runs of positions; positions in ``idle`` have no block.

    Raises ValueError where the positions do not divide evenly, or an idle one is not there.
    """
    positions = blocks + len(set(idle))
    outside = [each for each in idle if each >= positions]
    if outside or positions % stages:
        found = f"position {outside[0]} of {positions}" if outside else f"{positions} positions for {stages} stages"
        raise ValueError(
            f"found {found}: the {blocks} blocks and those that do nothing together must be a multiple of the stages"
        )
    length = positions // stages
    return [
        length - sum(stage * length <= each < (stage + 1) * length for each in set(idle)) for stage in range(stages)
    ]
