"""Every pair of features types along its axes, and a reduction that is missing or done twice does not."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import tiny_models
import torch
from placement_types import MOVES, ends, fake_world, is_invariant, of_all_ranks, typed
from sequence_sharded_models import algorithm
from spmd_types import I, P, R, SpmdTypeError, V
from torch import nn
from torch.nn import functional

from ds_npu.comm import crossing
from ds_npu.features.build import MODEL_PLAN, Build
from ds_npu.features.chunked_loss.loss_by_chunks import CHUNKED_LOSS
from ds_npu.features.context_parallel import loss
from ds_npu.features.context_parallel.sharded_sequences import shard_sequences
from ds_npu.features.driver import apply_features
from ds_npu.features.fused_ops.fused_model import fuse
from ds_npu.features.tensor_parallel import experts
from ds_npu.features.tensor_parallel.sharded_model import shard_model
from ds_npu.models.globs import plan_for
from ds_npu.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLoss,
    sharding_of,
)
from ds_npu.parallel.runtime.placement import placement_of, set_placement
from ds_npu.parallel.tensor import embedding, sequence_shards
from ds_npu.parallel.tensor.weight_gradient import sum_gradient
from ds_npu.topology.degrees import Degrees

FUSED = ["rms_norm", "swiglu", "rotary", "cross_entropy", "flash_attention"]


def loss_types(
    degrees, sequence_parallel=False, chosen=None, fused=False, family="qwen3", change=None, **changes
) -> bool:
    """Whether the loss of a model with these features is the same on all ranks, and backward begins alike on them."""
    with fake_world(degrees) as topology:
        model = tiny_models.tiny(family, torch.float32, **changes)
        plan = plan_for(model, {})
        MODEL_PLAN.set(model, plan)
        if degrees.tp > 1:
            shard_model(model, plan, topology, sequence_parallel)
        if fused:
            fuse(model, plan, [key for key in FUSED if key != "flash_attention" or degrees.cp == 1])
        if degrees.cp > 1:
            shard_sequences(model, plan, topology, algorithm(chosen, degrees.cp))
        if change:
            change(model, topology)
        with typed(model, topology):
            ids = of_all_ranks(torch.randint(0, tiny_models.VOCABULARY, (2, 16)), topology)
            found = model(input_ids=ids, labels=ids.clone()).loss
            found.backward()
            return is_invariant(found, topology)


TENSOR = {"": (1, False), "tensor": (2, False), "sequence_parallel": (2, True)}
CONTEXT = {None: 1, "ulysses": 2, "ring": 2, "allgather": 2, "hybrid": 4, "double ring": 4}
"""By algorithm, the context ranks."""


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused_ops"])
@pytest.mark.parametrize("chosen", CONTEXT)
@pytest.mark.parametrize("tensor", TENSOR)
def test_every_pair_of_features_types(tensor, chosen, fused):
    size, sequence_parallel = TENSOR[tensor]
    assert loss_types(Degrees(tp=size, cp=CONTEXT[chosen]), sequence_parallel, chosen, fused)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.parametrize("tensor", ["tensor", "sequence_parallel"])
def test_every_family_types(family, tensor):
    assert loss_types(Degrees(tp=2), TENSOR[tensor][1], family=family)
    # An auxiliary loss, whole on each context rank, is added to a rank's share and taken out again (LossShare): right,
    # but not by types.
    changes = {"output_router_logits": False} if "output_router_logits" in tiny_models.FAMILIES[family][1] else {}
    assert loss_types(Degrees(tp=2, cp=2), TENSOR[tensor][1], "ulysses", family=family, **changes)


def in_chunks(model, topology):
    apply_features([(CHUNKED_LOSS, 8)], Build(topology, model))


@pytest.mark.parametrize(("tensor", "context"), [("tensor", 1), ("", 2), ("tensor", 2), ("sequence_parallel", 2)])
def test_a_chunked_loss_types(tensor, context):
    size, sequence_parallel = TENSOR[tensor]
    assert loss_types(Degrees(tp=size, cp=context), sequence_parallel, "ring", change=in_chunks)


class OwnModel(nn.Module):
    """Of the layers that ds_npu.parallel exports; with ``sequence_parallel`` between the embedding and the head."""

    def __init__(self, topology, sequence_parallel):
        super().__init__()
        self.sequence_parallel, self.group = sequence_parallel, topology.group("tp")
        self.embed = VocabParallelEmbedding(64, 32, topology)
        self.up = ColumnParallelLinear(32, 48, topology, sequence_parallel=sequence_parallel)
        self.down = RowParallelLinear(48, 32, topology, sequence_parallel=sequence_parallel)
        self.head = ColumnParallelLinear(32, 64, topology, bias=False)
        self.loss = VocabParallelLoss(topology, sharding_of(self.head.weight))

    def forward(self, ids):
        x = self.embed(ids)
        x = crossing.shard(x, 1, self.group) if self.sequence_parallel else x
        x = x + self.down(functional.gelu(self.up(x)))
        x = crossing.collect(x, 1, self.group) if self.sequence_parallel else x
        return self.loss(self.head(x), ids, vocab_size=64)


def own_loss_types(sequence_parallel, change=None):
    with fake_world(Degrees(tp=2)) as topology:
        model = OwnModel(topology, sequence_parallel)
        if change:
            change(model, topology)
        with typed(model, topology):
            return is_invariant(model(of_all_ranks(torch.randint(0, 64, (2, 16)), topology)), topology)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_for_models_of_ones_own_type(sequence_parallel):
    assert own_loss_types(sequence_parallel)
    # Its gradient is then not summed over sequence shards, or summed where every rank has all of it.
    change = without("down.bias") if sequence_parallel else summed_again("down.bias")
    with pytest.raises(SpmdTypeError, match="cannot mix"):
        own_loss_types(sequence_parallel, change)


# ---- faults ----


def without(name, replaced=True):
    """The gradient of this weight is not summed over the tensor ranks, nor, if ``replaced``, is it placed so."""

    def change(model, topology):
        weight = model.get_parameter(name)
        weight._backward_hooks.clear()
        if replaced:
            set_placement(weight, dataclasses.replace(placement_of(weight), partial=frozenset()))

    return change


def summed_again(name):
    """The gradient of this weight is summed over the tensor ranks, once more if it was."""
    return lambda model, topology: sum_gradient(model.get_parameter(name), topology.group("tp"))


BLOCK = "model.layers.0."
WEIGHTS = {
    "norm of sequence shards, not summed": (True, without(f"{BLOCK}input_layernorm.weight")),
    "norm of sequence shards, placed as summed": (True, without(f"{BLOCK}input_layernorm.weight", replaced=False)),
    "norm of sequence shards, summed twice": (True, summed_again(f"{BLOCK}input_layernorm.weight")),
    "norm of whole sequences, summed": (False, summed_again(f"{BLOCK}input_layernorm.weight")),
    "norm behind the last shard, summed": (True, summed_again("model.norm.weight")),
    "norm of a rank's heads, not summed": (False, without(f"{BLOCK}self_attn.q_norm.weight")),
    "a weight that is sharded, summed": (False, summed_again(f"{BLOCK}mlp.gate_proj.weight")),
}


@pytest.mark.parametrize("fault", WEIGHTS)
def test_a_gradient_that_is_not_summed_or_twice_is_found(fault):
    sequence_parallel, change = WEIGHTS[fault]
    with pytest.raises(SpmdTypeError):
        loss_types(Degrees(tp=2), sequence_parallel, change=change)


def _unchanged(x, *rest):
    return x


def _twice(x, group):
    return crossing.reduce(crossing.reduce(x, group), group)


def _summed_back_too(x, group):
    """Megatron's classic: the sum of the forward is summed again in backward."""
    return crossing._cross(x, crossing._sum, crossing._sum, 0, group)


def _gathered_for_all(x, dim, group):
    """Gradients are scattered where every rank has the same one: tp times too large."""
    return crossing.gather(x, dim, group)


CROSSINGS = {
    "embedding, not summed": (embedding, "reduce", _unchanged, "tensor"),
    "embedding, summed twice": (embedding, "reduce", _twice, "tensor"),
    "embedding, summed back too": (embedding, "reduce", _summed_back_too, "tensor"),
    "sequence shards, joined as in a region": (sequence_shards, "collect", _gathered_for_all, "sequence_parallel"),
    "loss of context ranks, not summed": (loss, "reduce", _unchanged, "context"),
    "loss of context ranks, summed twice": (loss, "reduce", _twice, "context"),
    "loss of context ranks, summed back too": (loss, "reduce", _summed_back_too, "context"),
    "experts, not summed": (experts, "reduce", _unchanged, "experts"),
    "inputs of experts, not summed back": (experts, "copy", _unchanged, "experts"),
}


@pytest.mark.parametrize("fault", CROSSINGS)
def test_a_crossing_that_is_missing_or_wrong_is_found(fault, monkeypatch):
    module, name, wrong, where = CROSSINGS[fault]
    monkeypatch.setattr(module, name, wrong)
    degrees = Degrees(cp=2) if where == "context" else Degrees(tp=2)
    chosen, family = ("ring" if where == "context" else None), ("mixtral" if where == "experts" else "qwen3")
    try:
        found = loss_types(degrees, where == "sequence_parallel", chosen, family=family)
    except SpmdTypeError:
        found = False
    assert not found


def test_crossings_are_pairs_of_collectives():
    pairs = {
        "copy": (crossing._same, crossing._sum, I, R),
        "reduce": (crossing._sum, crossing._same, P, I),
        "gather": (crossing._gather, crossing._scatter, V, R),
        "scatter_sum": (crossing._scatter, crossing._gather, P, V),
        "shard": (crossing._slice, crossing._gather, I, V),
        "collect": (crossing._gather, crossing._slice, V, I),
    }
    for forward, conjugate, before, after in pairs.values():
        assert ends(forward, conjugate) == (before, after)
    # A sum both ways is one, too, which ds_npu does not need: from summands to what each rank uses for its part.
    assert ends(crossing._sum, crossing._sum) == (P, R)
    right = {(crossing._sum, crossing._sum), *(pair[:2] for pair in pairs.values())}
    for wrong in set(itertools.product(MOVES, MOVES)) - right:
        with pytest.raises(SpmdTypeError):
            ends(*wrong)
