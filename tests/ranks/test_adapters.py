"""LoRA adapters (peft) on layers that are sharded over the tensor ranks, against one process in float64."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import tensor_parallel_rule
import tiny_models
import torch
import torch.distributed as dist
from adapted_models import ATTENTION, LATENT, MLP, adapted, agree, assert_same_gradients, everyones, loss_of, split
from ranks import run_on_ranks
from tiny_models import FAMILIES
from torch import nn

from ds_npu.features.fused_ops.fused_model import FUSIONS, fuse
from ds_npu.models.globs import plan_for
from ds_npu.parallel.runtime.placement import sharding_of
from ds_npu.parallel.tensor.region import RegionInput

pytestmark = pytest.mark.slow

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
    """What is not trained has no gradient, and of the adapters no rank holds more than it needs."""
    size = dist.get_world_size()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad or parameter.grad is None, name
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


def fused_body():
    targets = [*ATTENTION, *MLP, "lm_head", "embed_tokens"]
    reference = adapted("llama", targets)
    loss_of(reference).backward()
    for sequence_parallel in (False, True):
        model = adapted("llama", targets)
        lines = fuse(model, plan_for(model, {}), FUSIONS)
        assert len(lines) == len(FUSIONS) and all(" is in " in line for line in lines), lines
        split(model, sequence_parallel)
        loss_of(model).backward()
        assert_same_gradients(model, reference)


def test_fused_operators_beside_adapters():
    run_on_ranks(2, fused_body)


def engine_body(family, targets):
    def model(family, dtype=torch.float64):
        return adapted(family, targets).to(dtype)

    with mock.patch.object(tiny_models, "tiny", model):
        tensor_parallel_rule.hold_to_one_process(family, 2, (0, 1, 2, 3), torch.float64, {})


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


def test_every_family_of_the_cases_exists():
    assert {family for family, *_ in CASES} <= FAMILIES.keys()
