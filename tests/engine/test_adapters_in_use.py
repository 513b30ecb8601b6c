"""LoRA adapters (peft) on split layers: chosen, merged, saved, in another dtype, and refused."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import torch.distributed as dist
from adapted_models import (
    ATTENTION,
    MLP,
    adapted,
    assert_same_gradients,
    error,
    logits_of,
    loss_of,
    mine,
    split,
    tokens,
)
from loading_models import tensor_holders
from ranks import run_on_ranks
from tiny_models import tiny

from ds_npu.checkpoint.saving import save_pretrained, whole_state_dict
from ds_npu.models.globs import plan_for
from ds_npu.models.plan import PlanError

pytestmark = pytest.mark.slow


def uses(model, name):
    """The model with its adapters used in one of several ways."""
    if name == "both":
        model.base_model.set_adapter(["default", "other"])
    elif name == "other":
        model.set_adapter("other")
    elif name == "merged":
        model.merge_adapter()
    elif name == "unmerged":
        model.merge_adapter()
        model.unmerge_adapter()
    elif name == "merged and unloaded":
        return model.merge_and_unload()
    return model


def several_body():
    targets = {"llama": [*ATTENTION, *MLP, "lm_head"], "gpt2": ["c_attn", "c_fc", "c_proj"], "qwen2": ["k_proj"]}
    for family, layers in targets.items():
        for sequence_parallel in (False, True):
            for name in ("both", "other", "merged", "unmerged", "merged and unloaded"):
                reference, model = (adapted(family, layers, ("default", "other")) for _ in range(2))
                split(model, sequence_parallel)
                found = logits_of(uses(model, name))
                assert error(found, logits_of(uses(reference, name))) < 1e-12, (family, name)
            reference, model = (adapted(family, layers, ("default", "other")) for _ in range(2))
            split(model, sequence_parallel)
            each = ["other", "__base__", "default"]
            assert error(logits_of(model, adapter_names=each), logits_of(reference, adapter_names=each)) < 1e-12
            with model.disable_adapter():
                assert error(logits_of(model), logits_of(tiny(family))) < 1e-12


@pytest.mark.slow
def test_adapters_are_chosen_disabled_and_merged_as_ever():
    run_on_ranks(4, several_body)


def merged_before_body():
    reference, model = (adapted("llama", ATTENTION) for _ in range(2))
    model.merge_adapter()
    split(model)
    assert error(logits_of(model), logits_of(reference)) < 1e-12
    model.unmerge_adapter()
    assert error(logits_of(model), logits_of(reference)) < 1e-12


def test_adapters_that_are_merged_when_the_model_is_split():
    run_on_ranks(2, merged_before_body)


def mixed_dtypes_body():
    def narrowed(model):
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                parameter.data = parameter.data.float()
        return model

    def gradients(model):
        return {name: each.grad for name, each in model.named_parameters() if each.requires_grad}

    def all_errors(found, expected):
        return error(*(torch.cat([each[name].flatten() for name in expected]) for each in (found, expected)))

    exact, usual = adapted("llama", ATTENTION + MLP), narrowed(adapted("llama", ATTENTION + MLP))
    loss_of(exact).backward()
    usual(input_ids=tokens(), labels=tokens()).loss.backward()
    for sequence_parallel in (False, True):
        model = split(narrowed(adapted("llama", ATTENTION + MLP)), sequence_parallel)
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        found = gradients(model)
        wanted, own = (
            {name: mine(model.get_parameter(name), each) for name, each in gradients(other).items()}
            for other in (exact, usual)
        )
        assert all_errors(found, wanted) <= 2 * all_errors(own, wanted)


def test_adapters_in_another_dtype_than_their_layers():
    run_on_ranks(2, mixed_dtypes_body)


def saved_body(folder):
    settings = {"modules_to_save": ["norm"]}
    model = split(adapted("phi3", "all-linear", **settings))
    weights = whole_state_dict(model, tensor_holders(dist.group.WORLD))
    if dist.get_rank() == 0:
        save_pretrained(model, folder, weights)
    dist.barrier()
    expected = adapted("phi3", "all-linear", **settings)
    loaded = peft.PeftModel.from_pretrained(tiny("phi3"), folder)
    loaded.double()
    found = peft.get_peft_model_state_dict(loaded)
    wanted = peft.get_peft_model_state_dict(expected)
    assert found.keys() == wanted.keys() and len(found) > 16
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.equal(logits_of(loaded), logits_of(expected))


def test_adapters_are_saved_for_the_plain_model(tmp_path):
    run_on_ranks(2, saved_body, tmp_path)


def trained_tokens_body():
    settings = {"trainable_token_indices": [1, int(tokens()[1, 2])]}
    reference = adapted("llama", ATTENTION, **settings)
    loss_of(reference).backward()
    for sequence_parallel in (False, True):
        model = split(adapted("llama", ATTENTION, **settings), sequence_parallel)
        assert error(logits_of(model), logits_of(reference)) < 1e-12
        loss_of(model.train()).backward()
        assert_same_gradients(model, reference)
    assert any("trainable_tokens" in name and each.grad is not None for name, each in model.named_parameters())


def test_tokens_that_are_trained_beside_adapters():
    run_on_ranks(2, trained_tokens_body)


VARIANT = {"alora_invocation_tokens": [3, 4], "task_type": "CAUSAL_LM"}


def refused_body():
    model = adapted("llama", ATTENTION, **VARIANT)
    before = copy.deepcopy(model.state_dict())
    said = "2 adapters|q_proj.base_layer \\(query\\): its adapter is the variant ALora"
    with pytest.raises(ValueError, match=said) as caught:
        split(model)
    assert "tensor ranks" in str(caught.value) and "Use plain LoRA" in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (peft.LoraConfig(target_modules=["q_proj"], use_dora=True), "only the two factors of LoRA"),
        (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "only the two factors of LoRA"),
    ],
)
def test_what_is_no_lora_is_refused(config, said):
    with pytest.raises(PlanError, match=said):
        plan_for(peft.get_peft_model(tiny("llama"), config), {})


def test_variants_of_lora_are_refused_before_anything_is_changed():
    run_on_ranks(2, refused_body)
