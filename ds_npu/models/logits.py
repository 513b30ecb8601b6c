"""Labels and logits of Hugging Face models: their names, and a guard for logits of which a rank holds a shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from ds_npu.parallel.tensor.shard_access import Shard, ShardCopy, local_shard

LABEL_ARGUMENTS = ("labels", "shift_labels")
"""Arguments of a forward with labels; a model that is trained on them needs no whole logits."""
IGNORED_LABEL = -100
"""transformers' label of a token without a target."""
REMEDY = "call the model without labels, or under model.eval(): they are whole then"

T = TypeVar("T")
Likeliest = Callable[[torch.Tensor], torch.Tensor]
"""From a rank's shard of logits to the likeliest word of every token."""


@dataclass(frozen=True)
class LogitsShard(Shard):
    """The logits that a ShardCopy is a shard of."""

    likeliest: Likeliest


def guard_shard(output: T, described: str, likeliest: Likeliest) -> T | ShardCopy:
    """Make an ``output`` that is a tensor raise ShardAccessError where somebody computes with it.

    It is this rank's shard, and nobody may take it for the whole. ``described`` says in the error what is sharded over
    which ranks. An ``output`` of another kind is returned as it is.
    """
    if not isinstance(output, torch.Tensor):
        return output
    return ShardCopy.of(output, LogitsShard(described, REMEDY, likeliest))


def likeliest_words(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest word of each token, int64 [B, S], of logits [B, S, V] that may be guarded.

    Of logits of which each rank holds a shard, every rank that shares the samples calls it.
    """
    shard = logits.shard if isinstance(logits, ShardCopy) else None
    return shard.likeliest(local_shard(logits)) if isinstance(shard, LogitsShard) else logits.argmax(-1)
