"""Cuts the batch of one forward into micro-batches."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ds_npu.models.logits import LABEL_ARGUMENTS
from ds_npu.parallel.runtime.calls import Keywords

KEY = "ds_npu.pipeline.micro_batches"
REMEDY = f"What to do: {KEY} 1, which leaves the batch whole, and more gradient accumulation steps or train_batch"
OF_SAMPLES = ("input_ids", "inputs_embeds", *LABEL_ARGUMENTS)
"""Arguments whose first dim is the samples of a batch."""
POSITIONS = "position_ids"
"""An argument whose last dims are samples (or 1) and tokens."""


def samples_of(given: Keywords) -> int:
    """The number of samples of a batch: the first dim of its tokens, or else of its first tensor with dims."""
    first = [given[name] for name in OF_SAMPLES if isinstance(given.get(name), torch.Tensor)]
    found = next((each for each in _tensors([first, dict(given)]) if each.dim() > 0), None)
    return 1 if found is None else len(found)


def sizes_of_parts(samples: int, count: int) -> list[int]:
    """How many samples each of ``count`` micro-batches has."""
    return [samples // count + (index < samples % count) for index in range(count)]


def cut(given: Keywords, count: int, pieces: Mapping[str, Sequence[Any]] | None = None) -> Sequence[Keywords]:
    """The arguments of ``count`` micro-batches; tensors of the batch's samples are cut, all else is whole in each.

    ``pieces``: for each argument that is cut in another way, its parts. Raises ValueError for a tensor whose relation
    to the samples is not known.
    """
    if count == 1:
        return [given]
    found = dict(pieces or {})
    samples = samples_of(given)
    parts: list[dict[str, Any]] = [{name: each[index] for name, each in found.items()} for index in range(count)]
    for name in given.keys() - found.keys():
        leaves, tree = tree_flatten(given[name])
        of_leaves = [_pieces(name, leaf, samples, count) for leaf in leaves]
        for index, part in enumerate(parts):
            part[name] = tree_unflatten([each[index] for each in of_leaves], tree)
    return parts


def _pieces(name: str, leaf: Any, samples: int, count: int) -> Sequence[Any]:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return [leaf] * count
    dim = leaf.dim() - 2 if name == POSITIONS and leaf.dim() > 1 else 0
    if leaf.shape[dim] == samples:
        return leaf.tensor_split(count, dim)
    if leaf.shape[dim] == 1:
        return [leaf] * count
    raise ValueError(
        f"{name} {list(leaf.shape)} beside {samples} samples: how it belongs to {count} micro-batches is not known. "
        f"{REMEDY}"
    )


def shape_of(part: Keywords) -> Hashable:
    """The shapes of a micro-batch's tensors, on which the shapes of its hidden states depend."""
    return tuple((name, *((each.shape, each.dtype) for each in _tensors(value))) for name, value in part.items())


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
