"""Copies of checkpoints in a peer's memory, from (simulated) NPUs through pinned memory."""

from __future__ import annotations

import copied_lives
from ranks import run_on_ranks

OWN = {"backend": "hccl", "sets_device": False}


def test_copies_hold_what_a_save_holds(tmp_path):
    cases = [("llama", 1, {}), ("llama", 0, {"parallel": {"tensor": 2}})]
    run_on_ranks(2, copied_lives.life, str(tmp_path), cases, **OWN)
