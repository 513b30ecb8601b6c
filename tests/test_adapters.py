"""LoRA adapters (peft) on layers that are split over the tensor ranks, against one process in float64."""

from __future__ import annotations

import copy
import math
from unittest import mock

import peft
import pytest
import test_tensor_parallel
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from tiny_models import FAMILIES, Float64, tiny
from torch import nn

from ds_npu.models.globs import plan_for
from ds_npu.models.plan import PlanError
from ds_npu.models.saving import save_pretrained, whole_state_dict
from ds_npu.models.tensor_parallel import split_model
from ds_npu.parallel.tensor.region import RegionInput
from ds_npu.parallel.tensor.sharding import sharding_of
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

SEQUENCE = 10  # over 4 ranks: 3, 3, 3, 1
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]

CASES = [
    ("llama", "all-linear", {}),
    ("llama", ["q_proj", "v_proj"], {"use_rslora": True}),
    ("llama", ["q_proj", "o_proj", "embed_tokens", "lm_head"], {}),
    ("llama", ["v_proj"], {"modules_to_save": ["lm_head", "embed_tokens", "q_proj", "norm"]}),
    ("qwen2", "all-linear", {"bias": "lora_only", "lora_bias": True}),
    ("gemma", ["k_proj", "embed_tokens"], {}),
    ("phi3", "all-linear", {}),
    ("gpt2", ["c_attn", "c_proj", "c_fc"], {"lora_bias": True}),
    ("gpt2", ["c_attn", "wte", "wpe"], {"bias": "all"}),
    ("mixtral", ATTENTION, {}),
    ("deepseek_v3", LATENT, {}),
]
"""Qwen2's two heads of keys and values are fewer than four ranks; Gemma has one."""


def adapted(family, targets, adapters=("default",), **settings):
    """A model with adapters that are not zero; they, and what PEFT trains beside them, are random."""
    model = tiny(family)
    for name in adapters:
        config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, **settings)
        if isinstance(model, peft.PeftModel):
            model.add_adapter(name, config)
        else:
            model = peft.get_peft_model(model, config, adapter_name=name)
    model.double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model.train()


def tokens():
    ids = tiny_models.tokens(3, SEQUENCE)
    ids[0, 4] = 0  # padding: an embedding gives it no gradient
    return ids


def loss_of(model):
    with Float64():
        return model(input_ids=tokens(), labels=tokens()).loss


def logits_of(model, **options):
    with Float64(), torch.no_grad():
        return model.eval()(input_ids=tokens(), **options).logits


def split(model, sequence_parallel=False):
    topology = Topology(Degrees(tp=dist.get_world_size()))
    split_model(model, plan_for(model, {}), topology, sequence_parallel)
    return model


def mine(parameter, whole):
    """What this rank holds of ``whole``."""
    sharding = sharding_of(parameter)
    return whole if sharding is None else sharding.take(whole, dist.get_rank())


def error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def assert_same_gradients(model, reference):
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert any(gradient is not None for gradient in expected.values())
    for name, parameter in model.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
        else:
            assert error(parameter.grad, mine(parameter, expected[name])) < 1e-12, name


def everyones(tensor):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, tensor.detach().clone())
    return found


def agree(tensor):
    first, *others = everyones(tensor)
    return all(torch.equal(first, other) for other in others)


def gradients_body():
    for family, targets, settings in CASES:
        reference = adapted(family, targets, **settings)
        loss = loss_of(reference)
        loss.backward()
        for sequence_parallel in (False, True):
            try:
                model = split(adapted(family, targets, **settings), sequence_parallel)
                found = loss_of(model)
                found.backward()
                assert abs(found - loss) < 1e-12
                assert_same_gradients(model, reference)
                assert_frozen(model)
            except Exception as problem:
                raise AssertionError(f"{family}, {targets}, {settings}, {sequence_parallel=}") from problem


def assert_frozen(model):
    """What is not trained has no hook, and of the adapters no rank holds more than it needs."""
    size = dist.get_world_size()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad or not parameter._backward_hooks, name
        if ".q_proj.lora_B" in name or ".o_proj.lora_A" in name or ".down_proj.lora_A" in name:
            assert parameter.numel() == sharding_of(parameter).size * 3 // size or parameter.dim() == 1, name


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_process(size):
    run_on_ranks(size, gradients_body)


def everything_trained_body():
    for family, targets, settings in CASES[:1] + CASES[4:5]:
        reference = adapted(family, targets, **settings).requires_grad_(True)
        loss_of(reference).backward()
        for sequence_parallel in (False, True):
            model = split(adapted(family, targets, **settings).requires_grad_(True), sequence_parallel)
            loss_of(model).backward()
            assert_same_gradients(model, reference)


@pytest.mark.slow
def test_the_model_may_be_trained_with_its_adapters():
    run_on_ranks(2, everything_trained_body)


def engine_body(family, targets):
    def model(family, dtype=torch.float64):
        return adapted(family, targets).to(dtype)

    with mock.patch.object(tiny_models, "tiny", model):
        test_tensor_parallel.steps(family, 2, (0, 1, 2, 3), torch.float64, {})


@pytest.mark.slow
def test_the_engine_trains_adapters_with_every_stage_of_zero():
    run_on_ranks(4, engine_body, "llama", [*ATTENTION, "down_proj", "lm_head"])


def kept_body():
    """Storage kept for backward, without the weights."""
    for sequence_parallel in (False, True):
        kept = {}
        for targets in (["q_proj"], ["q_proj", "down_proj"]):
            model = split(adapted("llama", targets), sequence_parallel)
            weights = {each.data_ptr() for each in model.parameters()}
            width = model.get_submodule("base_model.model.model.layers.0.mlp.gate_proj").weight.shape[0]
            found = {}

            def keep(tensor, found=found, weights=weights):
                if tensor.data_ptr() not in weights:
                    found[tensor.data_ptr()] = tensor
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss_of(model)
            kept[len(targets)] = sum(tensor.shape[-1:] == (width,) for tensor in found.values())
        # What goes into each of the two blocks' down_proj is kept for the adapter only.
        assert kept[2] - kept[1] == 2, kept


def test_frozen_layers_keep_nothing_for_their_gradients():
    run_on_ranks(2, kept_body)


class Masks:
    """What dropout did to its inputs, by module."""

    def __init__(self, model):
        self.found = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout) and "lora_dropout" in name:
                module.register_forward_hook(lambda _, x, y, name=name: self.note(name, x[0], y))

    def note(self, name, x, y):
        x, y = (each.source if isinstance(each, RegionInput) else each for each in (x, y))
        assert name not in self.found and (x != 0).all()
        self.found[name] = (y / x).detach()

    def whole(self, sequence_parallel):
        """The masks of one process."""
        masks = {}
        for name, mask in self.found.items():
            parts = everyones(mask)
            if any(row in name for row in ("o_proj", "down_proj")):
                masks[name] = torch.cat(parts, dim=-1)
                assert_independent([part.flatten() for part in parts])
            elif sequence_parallel:
                masks[name] = torch.cat(parts, dim=1)
                assert_independent([part.flatten() for part in parts])
            else:
                masks[name] = parts[0]
                assert agree(mask), name
        return masks


def assert_independent(parts):
    """Of dropout at one half, in 5 sigmas."""
    for index, one in enumerate(parts):
        for other in parts[:index]:
            equal = (one == other).double().mean().item()
            assert abs(equal - 0.5) < 2.5 / math.sqrt(one.numel()), equal


class Mask(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return x * self.mask


def with_masks(model, masks):
    for name, mask in masks.items():
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent)[leaf] = Mask(mask)
    return model


def dropout_body(sequence_parallel):
    targets = ATTENTION + MLP
    model = split(adapted("llama", targets, lora_dropout=0.5), sequence_parallel)
    masks = Masks(model)
    torch.manual_seed(7)
    loss = loss_of(model)
    loss.backward()
    assert agree(torch.rand(4)), "numbers outside of regions must agree"
    reference = with_masks(adapted("llama", targets), masks.whole(sequence_parallel))
    expected = loss_of(reference)
    expected.backward()
    assert abs(loss - expected) < 1e-12 and abs(loss - loss_of(adapted("llama", targets))) > 1e-3
    assert_same_gradients(model, reference)
    masks.found.clear()
    torch.manual_seed(7)
    assert torch.equal(loss, loss_of(model)), "runs repeat bitwise for a seed"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.optim.SGD(trained, lr=0.1).step()
    assert all(agree(parameter) for parameter in trained if sharding_of(parameter) is None)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_one_processs_with_the_masks_of_all_ranks(sequence_parallel):
    run_on_ranks(2, dropout_body, sequence_parallel)


def latent_dropout_body():
    for sequence_parallel in (False, True):
        model = split(adapted("deepseek_v3", LATENT, lora_dropout=0.5), sequence_parallel)
        loss_of(model).backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and sharding_of(parameter) is None:
                assert agree(parameter.grad), name
        assert agree(torch.rand(4))


@pytest.mark.slow
def test_gradients_of_whole_factors_agree_with_dropout_on_latents():
    run_on_ranks(2, latent_dropout_body)


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
    weights = whole_state_dict(model, dist.group.WORLD)
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
        (peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1]), "trainable_tokens_delta"),
        (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "only the two factors of LoRA"),
        (peft.LoraConfig(target_parameters=["mlp.experts.gate_up_proj"]), "what PEFT adds to experts"),
    ],
)
def test_what_is_no_lora_is_refused(config, said):
    family = "mixtral" if config.peft_type == "LORA" and config.target_parameters else "llama"
    with pytest.raises(PlanError, match=said):
        plan_for(peft.get_peft_model(tiny(family), config), {})


def test_variants_of_lora_are_refused_before_anything_is_changed():
    run_on_ranks(2, refused_body)


def test_every_family_of_the_cases_exists():
    assert {family for family, *_ in CASES} <= FAMILIES.keys()
