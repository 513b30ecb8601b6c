"""On simulated NPUs: a step that is not finite ends the run, its rank and layer named, whoever reads the norm."""

from __future__ import annotations

from not_finite_steps import BF16, UNREAD, Case, stops_after_the_update, stops_before_the_update
from ranks import run_on_ranks


def both(folder: str) -> None:
    stops_before_the_update([Case(BF16, 1), Case(BF16, 3)], folder)
    stops_after_the_update([Case(UNREAD, 1)], folder)


def test_the_step_rank_and_layer_are_named(tmp_path):
    run_on_ranks(2, both, f"{tmp_path}/", backend="hccl", sets_device=False)
