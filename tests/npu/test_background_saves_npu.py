"""Saves behind training on (simulated) NPUs: through pinned memory, with a step in between, as saves that block."""

from __future__ import annotations

import background_lives as lives
from ranks import run_on_ranks

OWN = {"backend": "hccl", "sets_device": False}


def test_a_save_behind_training_holds_what_one_that_blocks_holds(tmp_path):
    run_on_ranks(2, lives.life, str(tmp_path), [0, 2], **OWN)
