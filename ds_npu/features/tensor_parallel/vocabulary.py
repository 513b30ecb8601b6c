"""The head of a language model over the tensor ranks: each has the logits of some words, and the loss is made of those.

Whole logits are built only where somebody asks for them: in evaluation, and in a forward without labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ds_npu.models.hf_model import is_hugging_face
from ds_npu.models.logits import LABEL_ARGUMENTS, guard_shard
from ds_npu.parallel.forward_wraps import wrap_forward
from ds_npu.parallel.tensor.axis import TensorAxis
from ds_npu.parallel.tensor.cross_entropy import VocabParallelLoss, gather_vocabulary
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.topology.topology import Topology


class ShardedLogits:
    """Whether, in the forward that is running, logits stay sharded over the tensor ranks."""

    def __init__(self) -> None:
        self.keep_sharded = False


def shard_logits(model: nn.Module, heads: Sequence[nn.Module], vocabulary: Sharding, topology: Topology) -> None:
    """Let ``model``, a Hugging Face causal language model, compute its loss from sharded logits, the sum of ``heads``.

    It does so where it is trained on labels; its output's ``logits`` are then this rank's part. A model of another kind
    gets whole logits.
    """
    state, group = ShardedLogits(), topology.group("tp")

    def logits(forward: Any, x: torch.Tensor) -> torch.Tensor:
        local: torch.Tensor = forward(x)
        return local if state.keep_sharded else gather_vocabulary(local, vocabulary, group)

    def whole(forward: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**signature.bind_partial(*args, **kwargs).arguments, **kwargs}
        state.keep_sharded = model.training and any(given.get(name) is not None for name in LABEL_ARGUMENTS)
        try:
            out = forward(*args, **kwargs)
            return out if not state.keep_sharded else _with_guarded_logits(out, vocabulary)
        finally:
            state.keep_sharded = False

    for head in heads:
        wrap_forward(head, logits)
    if not is_hugging_face(model):
        return
    signature = inspect.signature(model.forward)
    wrap_forward(model, whole)
    vocab_parallel, usual = VocabParallelLoss(topology, vocabulary), _loss_function(model)

    def loss(*args: Any, **kwargs: Any) -> Any:
        return vocab_parallel(*args, **kwargs) if state.keep_sharded else usual(*args, **kwargs)

    model.loss_function = loss


def _with_guarded_logits(out: Any, vocabulary: Sharding) -> Any:
    if isinstance(out, dict) and "logits" in out:
        ranks = f"{len(vocabulary.ranges)} tensor ranks (ds_npu.parallel.tensor)"
        described = f"logits of {vocabulary.size} words, in training on labels, are split over {ranks}"
        out["logits"] = guard_shard(out["logits"], described)
    return out


def _loss_function(model: Any) -> Any:
    """A Hugging Face model's own; it is a property, made anew at each look."""
    return model.loss_function


def local_axis(axis: TensorAxis) -> TensorAxis:
    """The axis of a head: hidden states that go into it are whole, with sequence parallelism too."""
    return TensorAxis(axis.group, axis.size, axis.rank, False, axis.collectives)
