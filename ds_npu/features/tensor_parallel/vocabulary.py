"""The head of a language model over the tensor ranks: each computes the logits of its words, and the loss from those.

Whole logits are built only where somebody needs them: in evaluation, and in a forward without labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from ds_npu.models.hugging_face_model import is_hugging_face
from ds_npu.models.logits import LABEL_ARGUMENTS, guard_shard
from ds_npu.parallel.forward_wraps import Level, wrap_forward
from ds_npu.parallel.tensor.axis import TensorAxis
from ds_npu.parallel.tensor.cross_entropy import VocabParallelLoss, gather_vocabulary
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.topology.topology import Topology

P = ParamSpec("P")
T = TypeVar("T")


class ShardedLogits:
    """Whether the logits stay sharded over the tensor ranks in the forward that is running."""

    def __init__(self) -> None:
        self.keep_sharded = False


def shard_logits(model: nn.Module, heads: Sequence[nn.Module], vocabulary: Sharding, topology: Topology) -> None:
    """Make a Hugging Face causal language model compute its loss from sharded logits, the sum of those of ``heads``.

    It does so where it is trained on labels; the ``logits`` it returns are then this rank's shard. ``heads`` of a
    ``model`` of another kind return whole logits.
    """
    state, group = ShardedLogits(), topology.group("tp")

    def logits(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        local = forward(x)
        return local if state.keep_sharded else gather_vocabulary(local, vocabulary, group)

    def sharded(forward: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        given = {**signature.bind_partial(*args, **kwargs).arguments, **kwargs}
        state.keep_sharded = model.training and any(given.get(name) is not None for name in LABEL_ARGUMENTS)
        try:
            out = forward(*args, **kwargs)
            return out if not state.keep_sharded else _with_guarded_logits(out, vocabulary)
        finally:
            state.keep_sharded = False

    for head in heads:
        wrap_forward(head, logits, Level.REGION)
    if not is_hugging_face(model):
        return
    signature = inspect.signature(model.forward)
    wrap_forward(model, sharded, Level.REGION)
    # A property of transformers, which makes a new function at each access.
    vocab_parallel, usual = VocabParallelLoss(topology, vocabulary), model.loss_function

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        return vocab_parallel(*args, **kwargs) if state.keep_sharded else usual(*args, **kwargs)

    model.loss_function = loss


def _with_guarded_logits(out: T, vocabulary: Sharding) -> T:
    if isinstance(out, dict) and "logits" in out:
        ranks = f"{len(vocabulary.ranges)} tensor ranks (ds_npu.parallel.tensor)"
        described = f"logits of {vocabulary.size} words, in training on labels, are sharded over {ranks}"
        out["logits"] = guard_shard(out["logits"], described)
    return out


def local_axis(axis: TensorAxis) -> TensorAxis:
    """``axis`` for a head: its inputs are whole hidden states, also with sequence parallelism."""
    return TensorAxis(axis.group, axis.size, axis.rank, False, axis.collectives)
