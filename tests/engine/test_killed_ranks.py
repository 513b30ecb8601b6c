"""One of two ranks is killed at each write, flush and rename of its save: what is whole is found, by the other, too."""

from __future__ import annotations

import random
from pathlib import Path

import killed_ranks as ranks
import matrix
import pytest

from ds_npu.checkpoint.wholeness import checkpoints_in, newest_whole, verify
from ds_npu.checkpoint.written import WrittenCheckpoint

DRAWN = 3
"""System calls of each case at which a run that is not exhaustive kills."""
MOST_CALLS = 100


def loaded(folder: Path) -> float:
    written = WrittenCheckpoint(folder)
    written.check_files(0, 1)
    weight = written.value("weight")
    written.close()
    assert tuple(weight.shape) == (ranks.ROWS, ranks.COLUMNS) and weight.unique().numel() == 1
    return float(weight[0, 0])


def counts(victim: int, behind: bool) -> list[int]:
    every = list(range(MOST_CALLS))
    if matrix.is_exhaustive():
        return every
    return sorted(random.Random(f"{matrix.seed()} {victim} {behind}").sample(every[:60], DRAWN))


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(("victim", "behind"), [(1, False), (0, False), (1, True), (0, True)])
def test_the_newest_whole_checkpoint_is_found(victim, behind, tmp_path):
    outcomes = set()
    for count in counts(victim, behind):
        folder = tmp_path / f"{count}"
        folder.mkdir()
        assert ranks.saved_by_two(folder, "before", 1.0, behind)
        is_done = ranks.saved_by_two(folder, "after", 2.0, behind, (victim, count))
        named = (folder / "latest").read_text()
        assert loaded(folder / named) == {"before": 1.0, "after": 2.0}[named]
        newest = newest_whole(folder)
        assert newest is not None and loaded(newest) in (1.0, 2.0)
        assert not [each for each in checkpoints_in(folder) if not each.problems and verify(each)]
        # A new run saves to the same tag, whatever is there.
        assert ranks.saved_by_two(folder, "after", 3.0, behind)
        assert loaded(folder / "after") == 3.0 and (folder / "latest").read_text() == "after"
        assert not [each for each in folder.rglob("*") if each.name.endswith((".unfinished", ".saving"))]
        outcomes.add(named)
        if is_done:
            break
    assert not matrix.is_exhaustive() or (is_done and outcomes == {"before", "after"})
