"""Experts that cannot be placed: errors that name the key, what was found and what is accepted, before a step."""

from __future__ import annotations

import pytest
import tiny_models
import transformers

from ds_npu.config.moe import MoeSection
from ds_npu.features.build import Build
from ds_npu.features.experts.expert_ranks import MOE
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import PlannedTopology

NOT_DIVIDED = r"parallel\.expert: found %d; a divisor of the 4 experts of model\.layers\.\*"
CASES = [
    ("mixtral", Degrees(dp=3, ep=3), {}, NOT_DIVIDED % 3),
    ("gpt_oss", Degrees(dp=8, ep=8), {}, NOT_DIVIDED % 8),
    (
        "mixtral",
        Degrees(dp=64, etp=64),
        {},
        r"expert_tensor: found 64; at most \d+, the columns of an expert",
    ),
    (
        "qwen3_moe",
        Degrees(dp=2, ep=2),
        {"num_experts_per_tok": 5},
        r"num_experts_per_tok in the config of Qwen3MoeForCausalLM: found 5; at most 4, the experts of model",
    ),
    (
        "llama",
        Degrees(dp=2, ep=2),
        {},
        "LlamaForCausalLM has no module of experts that ds_npu knows",
    ),
]


@pytest.mark.parametrize(("family", "degrees", "changes", "said"), CASES)
def test_what_is_wrong_is_named(family, degrees, changes, said):
    model = getattr(transformers, (tiny_models.OF_EXPERTS)[family][0])(tiny_models.config_of(family, **changes))
    with pytest.raises(ValueError, match=said):
        list(MOE.declare(MoeSection(), Build(PlannedTopology(degrees), model)))
