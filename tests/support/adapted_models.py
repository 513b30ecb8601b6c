"""Tiny models with LoRA adapters, and what tests ask of them."""

from __future__ import annotations

import peft
import tiny_models
import torch
import torch.distributed as dist
from tiny_models import Float64, tiny

from ds_npu.features.tensor_parallel.sharded_model import shard_model
from ds_npu.models.globs import plan_for
from ds_npu.parallel.runtime.placement import sharding_of
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

SEQUENCE = 10  # over 4 ranks: 3, 3, 3, 1
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


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
    shard_model(model, plan_for(model, {}), topology, sequence_parallel)
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
