"""Keys that shard nothing work for models whose tensor-parallel plan is not known: each asks for the roles it uses.

Every loss and gradient is that of the model without keys, in float64; what cannot be done is refused by its own key.
"""

from __future__ import annotations

from collections.abc import Callable

import decoder_families
import pytest
import tiny_models
import torch

from ds_npu.config.sections import DsNpuConfig
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features, values_in
from ds_npu.memory import swapped_activations
from ds_npu.memory.recomputation import Recomputation
from ds_npu.models.plan import PlanError
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import PlannedTopology

FAMILIES = ("gpt_neox", "qwen2_moe", "gpt_oss", "olmoe", "olmo2", "phi", "bloom")
"""Of each, the plan of the whole model is not known, or the family is not in ``tiny_models``."""
UNPLANNED = {"gpt_neox", "qwen2_moe", "gpt_oss", "olmoe", "bloom"}
KEYS: dict[str, dict[str, object]] = {
    "chunked_loss": {"chunked_loss": 4},
    "activation_function": {"recompute": {"activation_function": True}},
    "norm": {"recompute": {"norm": True}},
    "layers": {"recompute": {"layers": "all"}},
    "runs": {"recompute": {"layers": 2, "method": "uniform"}},
    "swap": {"swap": {"activations": True}},
    "memory_report": {"memory_report": True},
    "fused": {"fused_ops": dict.fromkeys(("rms_norm", "swiglu", "rotary", "cross_entropy", "flash_attention"), True)},
}
WITHOUT_MLP = {"gpt_oss", "olmoe"}
"""Families without a dense MLP of linears that ds_npu knows."""
ROUNDING = {"chunked_loss", "fused"}
EXACT = 1e-12


def step(model: torch.nn.Module) -> list[torch.Tensor]:
    ids = tiny_models.tokens(2, 13)
    with tiny_models.Float64():
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def compute_in_float64(self: Recomputation, compute: Callable[[Recomputation], None] = Recomputation._compute) -> None:
    """``Recomputation._compute`` in the mode of its forward, which torch leaves in backward."""
    with tiny_models.Float64():
        compute(self)


def built(family: str, keys: dict[str, object], tensor: int = 1) -> tuple[torch.nn.Module, Build]:
    model = decoder_families.made(family)
    build = Build(PlannedTopology(Degrees(tp=tensor)), model)
    section = {**keys, "parallel": {"tensor": tensor, "probe": False}}
    apply_features(values_in(DsNpuConfig.model_validate(section)), build)
    return model, build


@pytest.mark.matrix(corners=2, drawn=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_are_those_without_keys(family, monkeypatch):
    monkeypatch.setattr(swapped_activations, "LEAST_BYTES", 1)
    monkeypatch.setattr(Recomputation, "_compute", compute_in_float64)
    expected = step(decoder_families.made(family))
    largest = max(float(each.norm()) for each in expected)
    for name, keys in KEYS.items():
        if name == "activation_function" and family in WITHOUT_MLP:
            with pytest.raises(ValueError, match=r"^ds_npu\.recompute\.activation_function: .* the role mlp\."):
                built(family, keys)
            continue
        found = step(built(family, keys)[0])
        assert len(found) == len(expected) > 10
        if name in ROUNDING:
            errors = [float((one - other).norm()) / largest for one, other in zip(found, expected, strict=True)]
            assert max(errors) <= EXACT, (name, max(errors))
        else:
            assert all(map(torch.equal, found, expected)), name


def test_the_activations_of_an_mlp_whose_linears_only_their_style_tells_are_computed_again():
    _, build = built("gpt_neox", KEYS["activation_function"])
    assert not [line for line in build.notes if "keeps its activations" in line]


def test_what_has_no_module_of_its_role_is_refused_by_its_own_key():
    refused = {
        "chunked_loss": r"ds_npu\.chunked_loss: HrmTextForCausalLM has no head, .* \(role head of ds_npu\.plan\)",
        "norm": r"ds_npu\.recompute\.norm: found True; no module of HrmTextForCausalLM .* the role norm\.",
        "layers": r"ds_npu\.recompute\.layers: found all; no module of HrmTextForCausalLM .* the role block\.",
        "swap": r"ds_npu\.swap\.activations: found true; no module of HrmTextForCausalLM .* the role block\.",
    }
    for name, said in refused.items():
        with pytest.raises(ValueError, match=f"^{said}") as caught:
            built("hrm_text", KEYS[name])
        assert not isinstance(caught.value, PlanError)


def test_tensor_ranks_ask_for_the_whole_plan():
    with pytest.raises(PlanError):
        built("codegen", KEYS["norm"], tensor=2)
