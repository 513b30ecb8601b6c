"""Shards the sequences of a Hugging Face model over the context ranks, in place; the user's script does not change.

The model takes whole batches, the same on every context rank, computes this rank's tokens of them, and returns whole
outputs. No class is changed: the attention functions of this one model are exchanged, and the forwards of some of its
modules are wrapped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.features.context_parallel.algorithm_choice import AlgorithmChoice, AlgorithmChooser
from ds_npu.features.context_parallel.forward import SequenceShardForward
from ds_npu.features.context_parallel.linear_attention_layers import scan_states
from ds_npu.features.context_parallel.loss import DIVIDED_BY, LossShare
from ds_npu.features.context_parallel.mixing import (
    WAY_OUT,
    attentions_of,
    check_mixing,
    check_noise,
    check_settings,
)
from ds_npu.features.context_parallel.sharded_attention import SequenceShardAttention
from ds_npu.features.context_parallel.sharded_batch import RunningBatch, ShardedBatch
from ds_npu.features.context_parallel.value_exchange import ValueExchangeOverlap
from ds_npu.features.declaration import Change, making
from ds_npu.features.loss.model_loss import LossLevel, shifts
from ds_npu.features.modules.attention_exchange import exchanges_of_attention
from ds_npu.models.attention_function import check_exchangeable, use_attention
from ds_npu.models.attributes import attribute
from ds_npu.models.guards import check_not_compiled, refuse_compiling, refuse_copies
from ds_npu.models.hugging_face_model import HuggingFaceModel, decoder_of, outermost_hugging_face_models
from ds_npu.models.hugging_face_plan import POSITIONS
from ds_npu.models.linear_attention import linear_attentions
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.context.held_tokens import HELD_TOKENS
from ds_npu.parallel.runtime.forward_wraps import Level, P, R, wrap_forward
from ds_npu.parallel.runtime.marks import Mark
from ds_npu.parallel.tensor.randomness import RegionRandomness, drops
from ds_npu.topology.topology import Topology

SEQUENCES_SHARDED: Mark[nn.Module] = Mark("sequences sharded")
"""Marks a sharded model of transformers and the model that holds it; the value of both is the latter."""
ALGORITHM_CHOICE: Mark[AlgorithmChoice] = Mark("context algorithm")
"""The chosen algorithm of a model."""
GUARDS = "__deepcopy__, compile"
"""Attributes that refuse what a sharded model cannot do."""
BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose angles depend on the length of the sequence."""
ROUTER_LOGITS = "router_logits"


def has_sharded_sequences(model: nn.Module) -> bool:
    """Whether ``shard_sequences`` was called with this ``model``."""
    return SEQUENCES_SHARDED.get(model) is model


def algorithm_choice_of(model: nn.Module) -> AlgorithmChoice | None:
    """The AlgorithmChoice of a model whose sequences are sharded, else None."""
    return ALGORITHM_CHOICE.get(model)


def declare_sequences(
    model: nn.Module,
    plan: ModelPlan,
    topology: Topology,
    algorithm: ContextAlgorithm | AlgorithmChooser,
    device_type: str = "cpu",
) -> list[Change]:
    """The changes, in order, that shard the sequences of the one model of transformers that ``model`` is or holds.

    With an AlgorithmChooser, ``algorithm_choice_of(model).choose`` is to be called before the first forward. Raises
    ValueError for a model in which more than attention mixes tokens.
    """
    inner = shardable_model(model, plan)
    randomness = RegionRandomness(topology, device_type, "cp")
    sharder = _SequenceSharder(model, inner, AlgorithmChoice(topology, algorithm), randomness)
    return list(sharder.changes(plan, topology))


shard_sequences = making(declare_sequences)


class _SequenceSharder:
    """Declares the changes of one model, and makes them when they are applied."""

    def __init__(
        self, model: nn.Module, inner: HuggingFaceModel, choice: AlgorithmChoice, randomness: RegionRandomness
    ) -> None:
        self.model, self.inner, self.choice, self.randomness = model, inner, choice, randomness
        self.names = {module: name for name, module in model.named_modules()}
        self.running_batch = RunningBatch()

    def changes(self, plan: ModelPlan, topology: Topology) -> Iterator[Change]:
        inner = self.inner
        running_batch = self.running_batch
        values = ValueExchangeOverlap(self.model, plan, topology, running_batch)
        attention = SequenceShardAttention(running_batch, values)
        attention.not_called = {module: name for name, module in attentions_of(inner).items()}
        make = partial(use_attention, self.model, attention.implementation())
        yield from exchanges_of_attention(self.model, "over sequence shards", make)
        for name in values.projections:
            # Registered in the first forward, so behind other hooks.
            yield Change("hooks", name, "its output starts the exchange of values")
        if shifts(inner, *DIVIDED_BY) is not None:
            yield Change("links", self.names[inner], "this rank's share of the loss", level=LossLevel.SHARE)
        decoder = decoder_of(inner)
        yield self._wrap(decoder, "router logits of all tokens", partial(gather_router_logits, decoder, running_batch))
        yield self._wrap(inner, "shards the batch", self._shard_batches)
        make = partial(wrap_forward, inner, partial(attention.checked, inner), Level.SEQUENCE)
        yield self._wrap(inner, "every attention is called", make)
        for name, layer in linear_attentions(self.model).items():
            make = partial(scan_states, layer, running_batch)
            yield Change("wraps", name, "states pass from rank to rank", make, Level.OPERATOR)
        for rotary in filter(depends_on_length, inner.modules()):
            yield self._wrap(rotary, "sees the last position", partial(show_last_position, rotary, running_batch))
        if inner is not self.model:
            yield self._wrap(self.model, "divides gradients", self._share_gradients)
            yield self._wrap(inner, "multiplies gradients", None)
        yield Change("sets", self.names[inner], SEQUENCES_SHARDED.name, self._finish)
        yield Change("sets", "", f"{SEQUENCES_SHARDED.name}, {ALGORITHM_CHOICE.name}, {HELD_TOKENS.name}, {GUARDS}")

    def _held_tokens(self) -> torch.Tensor | None:
        batch = self.running_batch.sharded
        return None if batch is None else batch.index

    def _wrap(self, module: nn.Module, what: str, make: Callable[[], object] | None) -> Change:
        return Change("wraps", self.names[module], what, make, Level.SEQUENCE)

    def _shard_batches(self) -> None:
        inner, shifted = self.inner, shifts(self.inner, *DIVIDED_BY)
        loss = None if shifted is None else LossShare(inner, shifted)
        numbers = self.randomness.region if any(map(drops, inner.modules())) else nullcontext
        forward = SequenceShardForward(inner, self.running_batch, self.choice, numbers, loss, _owns_positions(inner))
        wrap_forward(inner, forward, Level.SEQUENCE)

    def _share_gradients(self) -> None:
        """Divide the gradients of the model's outputs by the number of ranks; multiply those of the inner model's.

        What the model computes from these outputs is the same on all ranks, whose weight gradients are summed; the
        inner model needs the whole gradient of its outputs.
        """
        size = self.choice.topology.size("cp")
        wrap_forward(self.model, partial(_scale_gradients, type(self.model).__name__, 1 / size), Level.SEQUENCE)
        wrap_forward(self.inner, partial(_scale_gradients, type(self.inner).__name__, size), Level.SEQUENCE)

    def _finish(self) -> None:
        SEQUENCES_SHARDED.set(self.inner, self.model)
        SEQUENCES_SHARDED.set(self.model, self.model)
        ALGORITHM_CHOICE.set(self.model, self.choice)
        HELD_TOKENS.set(self.model, self._held_tokens)
        refuse_copies(self.model)
        refuse_compiling(self.model, "context")


def shardable_model(model: nn.Module, plan: ModelPlan) -> HuggingFaceModel:
    """The one model of transformers that ``model`` is or holds; raises ValueError where it cannot be sharded."""
    found = outermost_hugging_face_models(model)
    who = type(model).__name__
    if len(found) != 1:
        raise ValueError(f"{who} holds {len(found)} models of transformers; ds_npu.parallel.context shards one")
    (inner,) = found
    if SEQUENCES_SHARDED.get(inner) is not None:
        raise ValueError(
            f"the {type(inner).__name__} in {who} was sharded as it stood in another model, and cannot be sharded "
            "again: make it anew, from its weights"
        )
    check_not_compiled(model, "context")
    shifts(inner, *DIVIDED_BY)
    check_settings(inner)
    check_noise(inner)
    try:
        check_exchangeable(inner)
    except ValueError as error:
        raise ValueError(f"ds_npu.parallel.context: {error}. {WAY_OUT}") from error
    check_mixing(inner, {module: plan.roles[name] for name, module in model.named_modules() if name in plan.roles})
    takes_positions = "position_ids" in inspect.signature(inner.forward).parameters
    if attentions_of(inner) and not takes_positions:
        raise ValueError(
            f"ds_npu.parallel.context: the forward of {type(inner).__name__} takes no position_ids, so it cannot be "
            "told which tokens of the sequence it has"
        )
    return inner


def _scale_gradients(who: str, factor: float, forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Multiply the gradients of the outputs of ``forward`` by ``factor``; raises TypeError for unknown containers."""
    out = forward(*args, **kwargs)

    def scaled(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda gradient: gradient * factor)
        elif not isinstance(x, torch.Tensor | int | float | str | NoneType):
            raise TypeError(f"{who} returns a {type(x).__name__}: tensors, lists, tuples and dicts are accepted")
        return x

    mapped: R = tree_map(scaled, out) if torch.is_grad_enabled() else out
    return mapped


def _owns_positions(inner: nn.Module) -> bool:
    """Whether ``inner`` looks up positions in a table by other numbers than 0, 1, ... (OPT and RoBERTa do)."""
    modules = ((name.rpartition(".")[2], each) for name, each in inner.named_modules())
    tables = [each for name, each in modules if name in POSITIONS and isinstance(each, nn.Embedding)]
    return any(type(table) is not nn.Embedding or table.padding_idx is not None for table in tables)


def depends_on_length(rotary: nn.Module) -> bool:
    """Whether the angles that ``rotary`` computes depend on the largest of its position_ids."""
    kind = attribute(rotary, "rope_type", str)
    kinds = attribute(rotary, "rope_type", dict)
    names = (kinds or {}).values() if kind is None else [kind]
    return any(isinstance(name, str) and any(kind in name for kind in BY_LENGTH) for name in names)


def show_last_position(rotary: nn.Module, running_batch: RunningBatch) -> None:
    """Append the batch's largest position to the position_ids of ``rotary``, and drop its angles from the result."""

    def turned(
        forward: Callable[..., Any], x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        batch = running_batch.require(f"a rotary embedding whose angles depend on the length, {type(rotary).__name__},")
        if not isinstance(batch, ShardedBatch):
            return forward(x, position_ids, *args, **kwargs)
        last = batch.last_position.expand(*position_ids.shape[:-1], 1)
        angles = forward(x, torch.cat([position_ids, last], -1), *args, **kwargs)
        return tree_map(lambda each: each[..., :-1, :], angles)

    wrap_forward(rotary, turned, Level.SEQUENCE)


def gather_router_logits(decoder: nn.Module, running_batch: RunningBatch) -> None:
    """Make ``decoder`` return the router logits of all tokens: the load-balancing loss multiplies two means of them.

    They are gathered outside of its blocks, which activation checkpointing recomputes.
    """

    def gathered(forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        out = forward(*args, **kwargs)
        batch = running_batch.sharded
        if batch is not None and isinstance(out, dict) and out.get(ROUTER_LOGITS) is not None:
            by_sample = (each.view(batch.samples, -1, each.shape[-1]) for each in out[ROUTER_LOGITS])
            out[ROUTER_LOGITS] = tuple(batch.gather(each).flatten(0, 1) for each in by_sample)
        return out

    wrap_forward(decoder, gathered, Level.SEQUENCE)
