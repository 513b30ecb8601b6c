"""``ds_npu.chunked_loss`` in pipeline stages: the last one computes head and loss, against one process with logits."""

from __future__ import annotations

import pipeline_rule as rule
import pytest
from ranks import run_on_ranks
from test_staged_engines import SEQUENCES, UNTIED, section

TOKENS = 3
"""Of a chunk: it divides no number of tokens of these batches."""
SEVERAL = {"num_key_value_heads": 2}
MODELS = {"llama": UNTIED, "gpt2": {}, "gemma2": {}, "qwen3_moe": {"output_router_logits": False}}
WORLDS = {
    "stages": (2, {}),
    "data": (4, {}),
    "tensor": (4, {"tensor": 2}),
    "sequences": (4, SEQUENCES),
    "context": (4, {"context": 2}),
}
"""By name, (ranks, ``ds_npu.parallel`` beside two stages)."""
CORNERS = [
    ("stages", "gpt2", "zb_v", {}),
    ("stages", "gemma2", "1f1b", {"recompute": "inline"}),
    ("tensor", "gpt2", "zb_h1", {}),
    ("context", "llama", "1f1b", {}),
]
CASES = [
    (world, family, schedule, {})
    for world in WORLDS
    for family in MODELS
    for schedule in ("1f1b", "zb_h1", "interleaved")
]


@pytest.mark.slow
@pytest.mark.matrix(corners=len(CORNERS), drawn=1)
@pytest.mark.parametrize(("world", "family", "schedule", "keys"), [*CORNERS, *CASES], ids=str)
def test_one_step_is_that_of_one_process(world, family, schedule, keys):
    ranks, parallel = WORLDS[world]
    sections = [section(2, schedule, keys, **parallel) | {"chunked_loss": TOKENS}]
    run_on_ranks(ranks, rule.hold_all, family, (0, 1, 2), sections, MODELS[family], deadline_s=600.0)
