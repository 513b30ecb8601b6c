"""The probe at start: a split that computes something else than the whole is refused, and nothing else is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import gradient_rule as rule
import numpy as np
import planned_models
import pytest
import tiny_models
import torch
from logged_lines import logged_lines
from ranks import run_on_ranks
from torch import nn
from weight_orders import GLOBS, Fused, cases, made

from ds_npu.features.modules.part_copy import ModelPart
from ds_npu.features.tensor_parallel import probe as sharding_probe
from ds_npu.features.tensor_parallel.probe import probe
from ds_npu.features.tensor_parallel.sharded_model import shard_model
from ds_npu.models.globs import plan_for
from ds_npu.parallel.runtime.placement import sharding_of
from ds_npu.parallel.tensor.sharding import Sharding
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
    model = planned_models.made(f"{family}ForCausalLM", **SIZES | {"num_key_value_heads": 2} | MORE[family])
    passes(model, {}, 2, False)
    passes(model, {}, 4, True, large=EVERYTHING_LARGE)


def test_scaled_inputs():
    """Llama-4's block loses its sequences; where experts have ranks of their own, ds_npu's forward of it does not."""
    model, other = tiny_models.tiny("llama4_text", torch.float32), tiny_models.tiny("mixtral", torch.float32)
    assert sharding_probe.has_scaled_inputs(model, plan_for(model, {}))
    assert not sharding_probe.has_scaled_inputs(other, plan_for(other, {}))
    passes(model, {})
    assert "in Llama4TextMLP" in probed(model, {}, 2, True).faults[0]


def test_adapters_pass():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj", "gate_proj", "down_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(tiny_models.tiny("qwen3", torch.float32), config)
    for sequence_parallel, large in itertools.product((False, True), (EVERYTHING_LARGE, sharding_probe.LARGE)):
        passes(model, {}, 2, sequence_parallel, large=large)


def test_a_trained_copy_of_the_embedding_passes():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    passes(peft.get_peft_model(tiny_models.tiny("qwen3", torch.float32), config), {})


# ---- what is wrong is refused ----

INTERLEAVED = "query_key_value, which means all heads' queries, then all keys, then all values; not head by head"
FAMILIES_BY_HEAD: dict[str, tuple[Callable[[], nn.Module], str, dict[str, str]]] = {
    "GPT-NeoX": (lambda: planned_models.made("GPTNeoXForCausalLM", **SIZES), "attention", {}),
    "Falcon": (
        lambda: planned_models.made(
            "FalconForCausalLM", **SIZES, ffn_hidden_size=48, multi_query=False, parallel_attn=False
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
    for size, large in itertools.product((2, 4), (EVERYTHING_LARGE, sharding_probe.LARGE)):
        found = probed(model, globs, size, large=large)
        assert found.unseen == [] and len(found.faults) == 1
        assert f"{attention}.query_key_value (" in found.faults[0] and INTERLEAVED in found.faults[0]
    # The way out that the message names.
    passes(model, beside | {f"**.{attention}": "replicated"})


OWN = GLOBS | {
    "layers.*.inner": "attention",
    "layers.*.inner.qkv": "query_key_value",
    "layers.*.inner.out": "attention_output",
}


def own(order: str = "by head", dtype: torch.dtype = torch.float32) -> nn.Module:
    return made(Fused, order).to(dtype)


class Awkward(nn.Module):
    """A block that needs more than hidden states, or that draws random numbers in evaluation, too."""

    def __init__(self, needs: bool) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 16))
        self.forward = self.two if needs else self.one

    def two(self, x, mask):
        return x + mask * self.mlp(x)

    def one(self, x):
        return x + nn.functional.dropout(self.mlp(x))


AWKWARD = {"*": "block", "*.mlp": "mlp", "*.mlp.0": "up", "*.mlp.2": "down"}


@pytest.mark.parametrize(("needs", "why"), [(True, "TypeError"), (False, "it draws random numbers in evaluation")])
def test_what_cannot_be_tried_is_said_and_the_mlp_in_it_is_tried_by_itself(needs, why):
    model = nn.Sequential(Awkward(needs))
    found = probed(model, AWKWARD)
    assert found.faults == [] and len(found.unseen) == 1
    assert found.unseen[0].startswith("*: ") and why in found.unseen[0]
    model[0].mlp[1] = nn.Softmax(-1)
    (fault,) = probed(model, AWKWARD).faults
    assert fault.startswith("  *.mlp: its output differs")


def test_what_stands_in_nothing_is_said():
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    found = probed(model, {"0": "column", "2": "row"})
    assert (found.faults, found.unseen) == ([], ["*, *: in no block, attention or mlp"])


# ---- nothing is disturbed ----


def state(model: nn.Module) -> list[object]:
    modules = [(id(each), each.training, dict(vars(each)["_forward_hooks"])) for each in model.modules()]
    tensors = [
        (name, id(each), each.requires_grad, each._version, each.detach().clone())
        for name, each in (*model.named_parameters(), *model.named_buffers())
    ]
    generators = [torch.random.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]
    return [modules, generators, str([each[:4] for each in tensors]), [each[4] for each in tensors]]


def test_nothing_of_the_model_is_used_or_changed():
    called = []
    for model, globs in ((tiny_models.tiny("mixtral", torch.float32, attention_dropout=0.5), {}), (own("qkv"), OWN)):
        for module in model.modules():
            module.register_forward_hook(lambda *_: called.append(1))
            module.register_full_backward_hook(lambda *_: called.append(1))
        next(model.parameters()).requires_grad_(False)
        *before, tensors = state(model)
        assert probed(model, globs, 2, True).faults == []
        *after, same = state(model)
        assert after == before and called == []
        assert all(torch.equal(found, expected) for found, expected in zip(same, tensors, strict=True))
        assert all(parameter.grad is None for parameter in model.parameters())


def test_large_weights_take_no_memory():
    sizes = {"hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672, "vocab_size": 128256}
    model = planned_models.made("LlamaForCausalLM", **SIZES | sizes)
    plan = plan_for(model, {})
    part = ModelPart(model, plan, "model", plan.blocks[:1])
    bytes_held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in part.weights.values()}
    assert sum(bytes_held.values()) < 32 << 20
    copied = part.copied().get_submodule("model.layers.0")
    assert copied.self_attn.q_proj.weight.shape == (8192, 8192) and copied.mlp.up_proj.weight.shape == (64, 8192)
    # Nor do the parts of them that a rank takes.
    weight = copied.self_attn.q_proj.weight.data
    part_of_it = Sharding(0, 8192, (((0, 4096),), ((4096, 8192),))).take(weight, 1)
    assert part_of_it.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert torch.equal(part_of_it[:3], weight[4096:4099])


# ---- from deepspeed.initialize ----


def initialize(model: nn.Module, globs: dict[str, str], **parallel: bool) -> object:
    import deepspeed

    section = {"parallel": {"tensor": 2, **parallel}, "plan": globs}
    settings = rule.config(1, torch.float32, {}) | {"ds_npu": section}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]


def refused_by_all(model: nn.Module, globs: dict[str, str]) -> str:
    import torch.distributed as dist

    before = {name: (id(weight), weight.shape) for name, weight in model.named_parameters()}
    with pytest.raises(ValueError) as caught:
        initialize(model, globs)
    said: list[str] = [""] * 2
    dist.all_gather_object(said, str(caught.value))
    assert said[0] == said[1] and caught.value.__context__ is None
    assert {name: (id(weight), weight.shape) for name, weight in model.named_parameters()} == before
    return said[0]


def from_initialize() -> None:
    import torch.distributed as dist

    rule.without_extension()
    said = refused_by_all(own(), OWN)
    begin = "ds_npu.parallel.tensor: found 2; sharded over so many ranks, Net does not compute what it does whole:"
    assert said.startswith(begin) and INTERLEAVED in said
    assert "ds_npu.parallel.probe false\nturns this check off" in said
    assert "layers.*.inner.qkv (Linear, weight [48, 16], bias [48]): query_key_value, which means" in said
    # On purpose, and rightly.
    assert initialize(own(), OWN, probe=False).topology.size("tp") == 2
    lines = logged_lines()
    awkward = nn.Sequential(nn.Embedding(16, 16), Awkward(True))
    beside = {f"1{glob[1:]}": role for glob, role in AWKWARD.items()}
    initialize(awkward, {"0": "embedding", **beside})
    initialize(own("qkv"), OWN)
    told = [line for line in lines if line.startswith("parallel.probe: ")]
    assert len(told) == (dist.get_rank() == 0) and all(
        "not tried, so that the plan is trusted: " in each for each in told
    )
    # One rank finds something that the other one does not.
    if dist.get_rank() == 1:
        sharding_probe.probe = lambda *_: sharding_probe.ProbeResult(["  found by rank 1"])
    assert "found by rank 1" in refused_by_all(own("qkv"), OWN)


def test_all_ranks_raise_the_same_before_anything_is_split():
    run_on_ranks(2, from_initialize)


# ---- the kind of fault ----


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
    shard_model(model, plan_for(model, globs), topology)
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
            shard_model(made(kind, order), plan, topology)
        except ValueError:  # Refused without a probe.
            continue
        found = probe(model, plan, 2, False)
        assert found.unseen == [], (kind, order, globs, found)
        exact = is_exact(kind, order, globs, topology)
        assert exact == (found.faults == []), (kind, order, globs, found)
        counts[exact] += 1
    assert min(counts.values()) > 5, counts


def test_every_accepted_assignment_of_roles_is_exact_and_every_refused_one_is_not():
    run_on_ranks(2, accepted_is_exact, 250, 0)
