"""The load of experts: biases that follow it, what the monitor and the report get, and that no step waits for it."""

from __future__ import annotations

import expert_loads
import pytest
from ranks import run_on_ranks

WORLDS = [
    (2, {"expert": 2}),
    (2, {"expert": 2, "tensor": 2}),
    (2, {"expert": 2, "tensor": 2, "sequence_parallel": True}),
    (2, {"expert": 2, "context": 2}),
    (1, {}),
    (4, {"expert": 2}),
    (2, {"pipeline": 2}),
]


@pytest.mark.slow
@pytest.mark.matrix(corners=3, drawn=1)
@pytest.mark.parametrize(
    ("ranks", "parallel", "stage", "checkpoints"),
    [(*world, stage, stage == 2) for world, stage in zip(WORLDS, (2, 0, 3, 1, 0, 2, 0), strict=True)],
)
def test_biases_follow_the_load(ranks, parallel, stage, checkpoints):
    run_on_ranks(ranks, expert_loads.biases_follow_the_load, parallel, stage, checkpoints)


@pytest.mark.slow
def test_biases_stay_in_float32():
    run_on_ranks(2, expert_loads.biases_stay_in_float32, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "factor"), [({"expert": 2}, None), ({"expert": 2, "tensor": 2}, 0.6), ({"pipeline": 2}, None)]
)
def test_loads_are_written(parallel, factor, tmp_path):
    run_on_ranks(2, expert_loads.loads_are_written, str(tmp_path), parallel, factor)


def test_a_model_without_a_bias_is_refused():
    with pytest.raises(
        Exception, match=r"bias_update_rate: found 0.1, and beside model.layers.1.mlp.experts in Qwen3Moe"
    ):
        run_on_ranks(1, expert_loads.refused)
