"""The probe at start: a split that computes something else than the whole is refused, and nothing else is."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import planned_models
import pytest
import tiny_models
import torch
from ranks import run_on_ranks
from split_orders import cases, made
from torch import nn

from ds_npu.models import split_probe
from ds_npu.models.globs import plan_for
from ds_npu.models.plan import PlanError
from ds_npu.models.split_probe import probe
from ds_npu.models.tensor_parallel import split_model
from ds_npu.parallel.tensor.sharding import sharding_of
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

SIZES = planned_models.SIZES | {"attn_implementation": "eager"}
EVERYTHING_LARGE = 200
"""Numbers from which on a weight is a view: with it, hardly any weight of a tiny model is not."""


def probed(model: nn.Module, globs: dict[str, str], size: int = 2, sequence_parallel: bool = False, **more: int):
    return probe(model, plan_for(model, globs), size, sequence_parallel, **more)


def passes(*args, **kwargs) -> None:
    found = probed(*args, **kwargs)
    assert (found.faults, found.unseen) == ([], [])


# ---- what is right passes: no false alarm, and everything was tried ----


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_family_passes(family):
    model = tiny_models.tiny(family, torch.float32)
    passes(model, {}, 2, False)
    passes(model, {}, 4, True)
    passes(model, {}, 3, True, large=EVERYTHING_LARGE)


MORE = {
    "Cohere": {},
    "DeepseekV2": planned_models.LATENT | planned_models.MOE | {"num_key_value_heads": 4, "head_dim": 8},
    "Exaone4": {"num_key_value_heads": 2},
    "Gemma2": {"head_dim": 8},
    "Glm4Moe": {"num_key_value_heads": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "Granite": {},
    "Olmo": {},
    "StableLm": {},
    "Starcoder2": {},
}
"""Families that nothing else tests."""


@pytest.mark.parametrize("family", MORE)
def test_more_families_pass(family):
    # On the meta device, as from_pretrained makes them.
    model = planned_models.made(f"{family}ForCausalLM", **SIZES | MORE[family])
    passes(model, {}, 2, False)
    passes(model, {}, 4, True, large=EVERYTHING_LARGE)


def test_adapters_pass():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj", "gate_proj", "down_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(tiny_models.tiny("qwen3", torch.float32), config)
    for sequence_parallel, large in itertools.product((False, True), (EVERYTHING_LARGE, split_probe.LARGE)):
        passes(model, {}, 2, sequence_parallel, large=large)


# ---- what is wrong is refused ----

INTERLEAVED = "query_key_value, which means the queries of all heads, then the keys of all, then the values of all"
FAMILIES_BY_HEAD: dict[str, tuple[Callable[[], nn.Module], str, dict[str, str]]] = {
    "GPT-NeoX": (lambda: planned_models.made("GPTNeoXForCausalLM", **SIZES), "attention", {}),
    "BLOOM": (
        lambda: planned_models.made("BloomForCausalLM", vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
        "self_attention",
        {"**.word_embeddings_layernorm": "norm", "**.dense_h_to_4h": "column", "**.dense_4h_to_h": "row"},
    ),
    "Falcon": (
        lambda: planned_models.made(
            "FalconForCausalLM", **SIZES, ffn_hidden_size=48, new_decoder_architecture=True, num_kv_heads=4
        ),
        "self_attention",
        {"**.dense_h_to_4h": "column", "**.dense_4h_to_h": "row"},
    ),
}


@pytest.mark.parametrize("family", FAMILIES_BY_HEAD)
def test_weights_that_are_interleaved_by_head_are_refused(family):
    make, attention, beside = FAMILIES_BY_HEAD[family]
    model = make()
    globs = beside | {
        f"**.{attention}.query_key_value": "query_key_value",
        f"**.{attention}.dense": "attention_output",
    }
    for size, large in itertools.product((2, 4), (EVERYTHING_LARGE, split_probe.LARGE)):
        found = probed(model, globs, size, large=large)
        assert found.unseen == [] and len(found.faults) == 1
        assert f"{attention}.query_key_value (" in found.faults[0] and INTERLEAVED in found.faults[0]
    # The way out that the message names.
    passes(model, beside | {f"**.{attention}": "replicated"})


FUSED = {
    "layers.*.inner": "attention",
    "layers.*.inner.qkv": "query_key_value",
    "layers.*.inner.out": "attention_output",
}


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of the whole weights."""
    import torch.distributed as dist

    found = {}
    for name, weight in model.named_parameters():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, weight.grad)
        sharding = sharding_of(weight)
        found[name] = sharding.assemble(parts) if sharding else parts[0]
    return found


def is_exact(kind: type, order: str, globs: dict[str, str], topology: Topology) -> bool:
    """Whether the real model, with its real weights and loss, is split exactly: the truth that the probe predicts."""
    ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(1))
    whole, model = made(kind, order), made(kind, order)
    expected = whole(ids)
    expected.backward()
    split_model(model, plan_for(model, globs), topology)
    try:
        loss = model(ids)
        loss.backward()
    except RuntimeError:  # Shapes that do not match, on every rank alike.
        return False
    found = gathered(model)
    same = [torch.allclose(found[name], each.grad, rtol=1e-9, atol=1e-12) for name, each in whole.named_parameters()]
    return all(same) and abs(float(loss - expected)) < 1e-12


def accepted_is_exact(count: int, seed: int) -> None:
    topology = Topology(Degrees(tp=2))
    counts = {True: 0, False: 0}
    for kind, order, globs in cases(count, seed):
        model = made(kind, order)
        try:
            plan = plan_for(model, globs)
        except PlanError:
            continue
        found = probe(model, plan, 2, False)
        assert found.unseen == [], (kind, order, globs, found)
        exact = is_exact(kind, order, globs, topology)
        assert exact == (found.faults == []), (kind, order, globs, found)
        counts[exact] += 1
    assert min(counts.values()) > 5, counts


def test_every_accepted_assignment_of_roles_is_exact_and_every_refused_one_is_not():
    run_on_ranks(2, accepted_is_exact, 1000, 0)
