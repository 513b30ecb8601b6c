"""The whole life of an unmodified Trainer script over expert ranks, against one without ds_npu."""

from __future__ import annotations

from pathlib import Path

import gradient_rule as rule
import pytest
import tiny_models
import torch
import transformers
from ranks import run_on_ranks
from trainer_lives import WHOLE, assert_close, ds_config, live, told
from trainer_runs import weights_in

pytestmark = pytest.mark.slow

SINGLE = 1e-6
"""Relative error in float32."""
LIVES = ["whole", "resumed"]
LAYOUTS: dict[str, tuple[int, int, dict[str, object]]] = {
    "experts": (2, 2, {"expert": 2}),
    "experts and tensor": (2, 1, {"expert": 2, "tensor": 2, "sequence_parallel": True}),
    "shards of experts, context": (2, 1, {"expert_tensor": 2, "context": 2}),
    "data, experts": (4, 2, {"expert": 2, "tensor": 2}),
}
"""By name: the ranks, those of data, and ds_npu.parallel."""
CASES = [*(("experts", stage) for stage in (3, 0, 1, 2)), *((name, 1) for name in LAYOUTS if name != "experts")]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("start"))
    # Without router logits, which are no predictions.
    tiny_models.tiny("qwen3_moe", torch.float32, output_router_logits=False).save_pretrained(folder)
    return folder


@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(("layout", "stage"), CASES)
def test_a_whole_life(layout: str, stage: int, start: str, tmp_path: Path):
    """Trains, evaluates, rotates checkpoints, loads the best one, predicts, saves, and resumes within an epoch."""
    ranks, data_ranks, parallel = LAYOUTS[layout]
    alone, mine = tmp_path / "alone", tmp_path / "mine"
    run_on_ranks(data_ranks, live, LIVES, str(alone), start, ds_config(1, None))
    run_on_ranks(ranks, live, LIVES, str(mine), start, ds_config(stage, parallel))
    expected, found = told(alone, data_ranks), told(mine, ranks)
    for each in (life for said in (*expected, *found) for life in said.values()):
        # The optimizer has a group of experts beside the Trainer's, of which the schedule names a rate, too.
        each["rates"] = list(dict.fromkeys(each["rates"]))
    for rank, each in enumerate(found):
        assert_close(each, expected[rank * data_ranks // ranks], SINGLE, f"rank {rank}")
        whole, resumed = each["whole"], each["resumed"]
        assert resumed["losses"] == whole["losses"][4:] and len(resumed["losses"]) > 4
    read, info = transformers.AutoModelForCausalLM.from_pretrained(mine / "whole", output_loading_info=True)
    assert not any(info.values()), info
    plain = transformers.AutoModelForCausalLM.from_pretrained(alone / "whole")
    assert rule.relative(read.state_dict(), plain.state_dict()) <= SINGLE
    for checkpoint in ("whole/checkpoint-2", f"whole/checkpoint-{WHOLE['max_steps']}"):
        assert rule.relative(weights_in(mine / checkpoint), weights_in(alone / checkpoint)) <= SINGLE
