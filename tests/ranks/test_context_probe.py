"""The probe of sequences at start: a block that takes something from token to token is refused, and nothing else is."""

from __future__ import annotations

import decoder_families as families
import peft
import pytest
import tiny_models
import torch
from ranks import run_on_ranks

from ds_npu.features.context_parallel.probe import check_context_blocks, probe_sequences
from ds_npu.features.modules.part_copy import decoder_unit
from ds_npu.features.tensor_parallel.probe import probe
from ds_npu.models.globs import partial_plan_for
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

PASSING = (
    *("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba2", "lfm2", "falcon_h1", "llama4_text"),
    "modernbert-decoder",
)
EVERYTHING_LARGE = 200


@pytest.mark.matrix(corners=len(PASSING), drawn=0)
@pytest.mark.parametrize("kind", PASSING)
def test_a_family_passes_and_was_tried(kind):
    with torch.device("meta"):
        model = families.class_of(kind)(families.config_of(kind))
    for large in (1 << 20, EVERYTHING_LARGE):
        found = probe_sequences(model, partial_plan_for(model, {}), large)
        assert (found.faults, found.unseen) == ([], [])


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"], ids=str)
def test_adapters_pass_beside_a_gated_delta_net(targets):
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(tiny_models.tiny("qwen3_5", torch.float32), config)
    found = probe_sequences(model, partial_plan_for(model, {}))
    assert (found.faults, found.unseen) == ([], [])


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "adapted"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_large_experts_are_tried_with_fewer_columns(family, adapted):
    model = tiny_models.tiny(family, torch.float32, intermediate_size=160, moe_intermediate_size=160)
    if adapted:
        experts = "feed_forward.experts" if family == "llama4_text" else "mlp.experts"
        parameters = [f"{experts}.gate_up_proj", f"{experts}.down_proj"]
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_parameters=parameters, init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    plan = partial_plan_for(model, {})
    unit = decoder_unit(model, plan, plan.blocks, EVERYTHING_LARGE)
    shapes = [each.shape for name, each in unit.part.copied().named_parameters() if "experts" in name]
    assert shapes and not {160, 320} & {size for shape in shapes for size in shape}
    for found in (probe_sequences(model, plan, EVERYTHING_LARGE), probe(model, plan, 2, False, EVERYTHING_LARGE)):
        assert (found.faults, found.unseen) == ([], [])


def mixing(in_backward_only: bool = False) -> torch.nn.Module:
    model = tiny_models.tiny("llama", torch.float32)
    mlp = model.model.layers[1].mlp

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        return type(mlp).__mro__[1].forward(self, x) + (mean - mean.detach() if in_backward_only else mean)

    mlp.__class__ = type("OwnMLP", (type(mlp),), {"forward": forward})
    return model


@pytest.mark.parametrize(("in_backward_only", "said"), [(False, "their output differs"), (True, "the gradient of")])
def test_an_mlp_that_mixes_tokens_is_found(in_backward_only, said):
    model = mixing(in_backward_only)
    found = probe_sequences(model, partial_plan_for(model, {}))
    assert len(found.faults) == 1 and said in found.faults[0] and "model.layers" in found.faults[0]


def refused() -> None:
    with pytest.raises(ValueError, match=r"does not compute over the tokens of 2 ranks[\s\S]*probe false"):
        model = mixing()
        check_context_blocks(model, partial_plan_for(model, {}), Topology(Degrees(cp=2)))


def test_all_ranks_refuse_it():
    run_on_ranks(2, refused)
