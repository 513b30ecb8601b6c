"""The head of a language model over the tensor ranks: each computes the logits of its words, and the loss from those.

Whole logits are built only where somebody needs them: in evaluation, in a forward without labels, and for a loss that
is not transformers' mean over the next tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from ds_npu.features.loss.model_loss import LossFunction, LossLevel, has_causal_lm_loss, link_of, wrap_loss
from ds_npu.models.hugging_face_model import HuggingFaceModel
from ds_npu.models.logits import LABEL_ARGUMENTS, guard_shard
from ds_npu.parallel.runtime.forward_wraps import Forward, Level, wrap_forward
from ds_npu.parallel.runtime.micro_batch import Fact, carried_by, new_forward, running
from ds_npu.parallel.tensor.cross_entropy import VocabParallelLoss, gather_vocabulary, vocabulary_argmax
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.topology.topology import Topology

T = TypeVar("T")


@dataclass
class _KeptShard:
    """The state of one forward whose logits are kept sharded over the tensor ranks."""

    is_computed: bool = False
    is_used: bool = False
    """Whether the loss was computed from them."""

    def check_used(self, who: str, error: Exception | None = None) -> None:
        """Raise ValueError if the model ``who`` has computed a loss of its own; ``error``: what it has ended with."""
        if self.is_computed and not self.is_used:
            ended = "" if error is None else f" (it ended with {type(error).__name__}: {error})"
            raise ValueError(
                f"{who} did not call its loss_function in training on labels, so its loss is its own, and was computed "
                f"from logits that ds_npu.parallel.tensor has sharded{ended}. What to do: give it no labels, and "
                "compute the loss from its logits"
            ) from error


class ShardedHead:
    """The head of one model, and the link of its loss; ``vocabulary``: its words over the tensor ranks."""

    def __init__(self, vocabulary: Sharding, topology: Topology) -> None:
        self.vocabulary, self.topology = vocabulary, topology
        self._kept: Fact[_KeptShard | None] = Fact()

    @cached_property
    def loss(self) -> VocabParallelLoss:
        return VocabParallelLoss(self.topology, self.vocabulary)

    def logits(self, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Wrap a head's forward: this rank's logits [..., V / tp] in a forward that keeps them, else [..., V]."""
        micro_batch = running() or carried_by(x)
        if micro_batch is not None:
            # For a checkpoint around the head, which calls it again in backward.
            micro_batch.carry_by(x)
        local, kept = forward(x), self._kept.of(micro_batch)
        if kept is None:
            return gather_vocabulary(local, self.vocabulary, self.topology.group("tp"))
        kept.is_computed = True
        return local

    def __call__(self, inner: LossFunction, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss: of sharded logits where they are kept, else what ``inner`` computes of whole ones."""
        kept = self._kept.of(running())
        if kept is None:
            return inner(*args, **kwargs)
        kept.is_used = True
        return self.loss(*args, **kwargs)

    def keep_shards(self, model: HuggingFaceModel) -> None:
        """Make ``model`` compute its loss from sharded logits where it is trained on labels."""
        signature = inspect.signature(model.forward)

        def sharded(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            given = {**signature.bind_partial(*args, **kwargs).arguments, **kwargs}
            is_kept = model.training and any(given.get(name) is not None for name in LABEL_ARGUMENTS)
            kept = _KeptShard() if is_kept else None
            if kept is not None:
                loss.check_not_replaced(model)
            with new_forward() as micro_batch:
                self._kept.set(micro_batch, kept)
                try:
                    out = forward(*args, **kwargs)
                except (ValueError, RuntimeError) as error:
                    # Subclasses (out of memory, a failed rank) say what they are.
                    if kept is not None and type(error) in (ValueError, RuntimeError):
                        kept.check_used(type(model).__name__, error)
                    raise
            return out if kept is None else self._guarded(out, kept, type(model).__name__)

        loss = wrap_loss(model, self, LossLevel.VOCABULARY, "parallel.tensor")
        wrap_forward(model, sharded, Level.REGION)

    def _guarded(self, out: T, kept: _KeptShard, who: str) -> T:
        """``out`` of a forward that kept its logits, with a guard on them; raises ValueError for a loss of its own."""
        if not kept.is_used:
            kept.check_used(who)
        if isinstance(out, dict) and "logits" in out:
            ranks = f"{len(self.vocabulary.ranges)} tensor ranks (ds_npu.parallel.tensor)"
            described = f"logits of {self.vocabulary.size} words, in training on labels, are sharded over {ranks}"
            vocabulary = self.vocabulary
            topology = self.topology
            out["logits"] = guard_shard(
                out["logits"], described, lambda logits: vocabulary_argmax(logits, vocabulary, topology.group("tp"))
            )
        return out


def shard_logits(model: nn.Module, heads: Sequence[nn.Module], vocabulary: Sharding, topology: Topology) -> None:
    """Make a Hugging Face causal language model compute its loss from sharded logits, the sum of those of ``heads``.

    It does so where it is trained on labels; the ``logits`` it returns are then this rank's shard. ``heads`` of a
    ``model`` of another kind, or with another loss than transformers' ForCausalLMLoss, return whole logits.
    """
    # PEFT keeps the original head, which belongs to the same model as the copy that it trains.
    known = link_of(model, LossLevel.VOCABULARY)
    head = known if isinstance(known, ShardedHead) else ShardedHead(vocabulary, topology)
    for each in heads:
        wrap_forward(each, head.logits, Level.REGION)
    if known is None and has_causal_lm_loss(model):
        head.keep_shards(model)
