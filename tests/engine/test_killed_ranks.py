"""One of two ranks is killed at each call of its save that changes a file: what is whole is found, by the other, too.

The calls are counted by a library below Python, whoever makes them.
"""

from __future__ import annotations

import random

import counted_kills
import killed_ranks
import matrix
import pytest

DRAWN = 3
"""Calls of each case before which a run that is not exhaustive kills."""
FEWEST, MOST_CALLS = 12, 100


def counts(victim: int, behind: bool) -> list[int]:
    every = list(range(MOST_CALLS))
    if matrix.is_exhaustive():
        return every
    return sorted(random.Random(f"{matrix.seed()} {victim} {behind}").sample(every[:FEWEST], DRAWN))


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(("victim", "behind"), [(1, False), (0, False), (1, True), (0, True)])
def test_the_newest_whole_checkpoint_is_found(victim, behind, tmp_path):
    library, folder = counted_kills.compiled(tmp_path), tmp_path / "saves"
    folder.mkdir()
    found = counted_kills.outcomes_of(library, folder, victim, behind, counts(victim, behind))
    if matrix.is_exhaustive():
        assert found[-1] == killed_ranks.DONE and len(found) > FEWEST and {"before", "after"} <= {*found}
        print(f"killed before each of {len(found) - 2} calls", flush=True)
    else:
        assert len(found) == DRAWN and killed_ranks.DONE not in found
