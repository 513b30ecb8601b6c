"""Weights of a checkpoint load without the optimizer's state on simulated NPUs, too, and a run goes on from them."""

from __future__ import annotations

import pytest
import weights_alone
from kept_state import Case
from ranks import run_on_ranks


def loads(folder: str) -> None:
    weights_alone.loads(Case(1), f"{folder}/1", ("plain", "both"))
    weights_alone.loads(Case(3), f"{folder}/3", ("swapped",))


@pytest.mark.slow
def test_a_run_begins_with_the_weights_that_were_loaded(tmp_path):
    run_on_ranks(2, loads, str(tmp_path), backend="hccl", sets_device=False)
