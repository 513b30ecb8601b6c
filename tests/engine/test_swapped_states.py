"""A run with its optimizer's states on a disk goes on from its checkpoints, at every layout, as if it had not ended."""

from __future__ import annotations

import matrix
import pytest
import swapped_lives
from ranks import run_on_ranks

ON_DISK, ALL = 4, 7
FIRST, WEIGHTS = [(0, 2), (1, 5), (4, 1)], [(7, 7), (8, 8)]
OTHERS = [(a, b) for a in range(ALL) for b in range(ALL) if min(a, b) < ON_DISK and (a, b) not in FIRST]
PAIRS = FIRST + WEIGHTS + OTHERS


@pytest.mark.slow
def test_checkpoints_of_states_on_a_disk_go_on_at_every_layout(tmp_path):
    pairs = PAIRS if matrix.is_exhaustive() else matrix.chosen("pairs on a disk", PAIRS, 2, 1)
    run_on_ranks(4, swapped_lives.hold, str(tmp_path), pairs, deadline_s=900.0)


def test_weights_are_loaded_without_states_on_a_disk(tmp_path):
    run_on_ranks(2, swapped_lives.weights_alone, str(tmp_path))


def test_a_checkpoint_of_deepspeed_alone_goes_on(tmp_path):
    run_on_ranks(2, swapped_lives.of_deepspeed_alone, str(tmp_path))
