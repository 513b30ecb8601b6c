"""Labels and logits of Hugging Face models: their names, and a guard for logits of which a rank holds a shard."""

from __future__ import annotations

from typing import TypeVar

import torch

from ds_npu.parallel.tensor.shard_access import Shard, ShardCopy

LABEL_ARGUMENTS = ("labels", "shift_labels")
"""Arguments of a forward with labels; a model that is trained on them needs no whole logits."""
IGNORED_LABEL = -100
"""transformers' label of a token without a target."""
REMEDY = "call the model without labels, or under model.eval(): they are whole then"

T = TypeVar("T")


def guard_shard(output: T, described: str) -> T | ShardCopy:
    """Make an ``output`` that is a tensor raise ShardAccessError where somebody computes with it.

    It is this rank's shard, and nobody may take it for the whole. ``described`` says in the error what is sharded over
    which ranks. An ``output`` of another kind is returned as it is.
    """
    return ShardCopy.of(output, Shard(described, REMEDY)) if isinstance(output, torch.Tensor) else output
