"""How many blocks each pipeline stage has, so that the slowest stage is as fast as it can be."""

from __future__ import annotations

from collections.abc import Collection, Sequence

ROUNDING, HALVINGS = 1e-9, 60


def balanced_counts(costs: Sequence[float], stages: int, behind: float = 0.0) -> list[int]:
    """The number of consecutive blocks of each stage whose largest sum of ``costs`` is the least.

    ``costs``: of each block, in any unit; ``behind``: of what the last stage computes behind its blocks (the head).
    Each stage has a block, but for the last one where what stands behind the blocks outweighs them. Of equally good
    numbers the earlier stages have the more. Raises ValueError where there are fewer blocks than stages.
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
    """Of the slowest stage."""
    loads, at = [], 0
    for count in counts:
        loads.append(sum(costs[at : at + count]))
        at += count
    return max([*loads[:-1], loads[-1] + behind])


def even_counts(blocks: int, stages: int, idle: Collection[int]) -> list[int]:
    """The blocks of each of ``stages`` equally long runs of positions, at some of which, ``idle``, nothing stands.

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
