"""Checks that a checkpoint fits a model, and tells everything that is wrong in one error."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ds_npu.checkpoint.conversion import Conversions, Converter
from ds_npu.checkpoint.files import CheckpointError

LISTED = 20
"""How many names of a kind an error lists; the others are counted."""

ADVICE = {
    "missing from the checkpoint": (
        "weights that are new (a head) are initialised by from_pretrained of the plain model in one process; load what "
        "its save_pretrained then writes"
    ),
    "in the checkpoint only": "load it with the class of model that was saved, whose name is in config.json",
    "of another shape": "the config must be the one that the checkpoint was saved with",
    "not convertible": "the files may be incomplete: fetch the checkpoint anew",
    "different, but tied by the config": 'set "tie_word_embeddings": false in config.json, or drop one of them',
}
"""Advice for each kind of problem."""

OUTDATED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers in older checkpoints that models compute today (transformers: _adjust_missing_and_unexpected_keys)."""

Problems = dict[str, list[str]]


def check_fit(
    model: PreTrainedModel,
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    found: Conversions,
    converter: Converter,
    tensors: Mapping[str, torch.Tensor],
) -> set[str]:
    """Return the names of the weights that ``tensors``, the checkpoint in ``folder``, provide.

    ``weights``: the model's parameters and persistent buffers by each of their names. Only the values of tied weights
    are read. Raises CheckpointError that lists every problem.
    """
    problems: Problems = {kind: [] for kind in ADVICE}
    shapes = _shapes(found, converter, tensors, problems)
    whole = converter.whole_shapes
    given = {id(weights[name]) for name in shapes if name in weights}
    given |= {id(weights[recipe.target]) for recipe in found.recipes}
    missing = [name for name, each in weights.items() if id(each) not in given]
    problems["missing from the checkpoint"] += [
        f"{name} {tuple(whole[name])}" for name in _others(missing, _patterns(model._keys_to_ignore_on_load_missing))
    ]
    problems["in the checkpoint only"] += _left_over(model, found) + [name for name in shapes if name not in whole]
    problems["of another shape"] += [
        f"{name}: {tuple(shape)} in the checkpoint, {tuple(whole[name])} in the model"
        for name, shape in shapes.items()
        if name in whole and shape != whole[name]
    ]
    problems["different, but tied by the config"] += _tied_but_different(weights, found, tensors)
    if any(problems.values()):
        raise CheckpointError(_text(model, folder, problems))
    return set(shapes)


def _shapes(
    found: Conversions, converter: Converter, tensors: Mapping[str, torch.Tensor], problems: Problems
) -> dict[str, torch.Size]:
    shapes: dict[str, torch.Size] = {}
    for recipe in found.recipes:
        try:
            shapes |= converter.shapes(recipe, tensors)
        except (ValueError, RuntimeError, LookupError, AttributeError) as error:
            problems["not convertible"].append(f"{recipe.target}, from {_some(recipe.names, 4)} ({error})")
    return shapes


def _left_over(model: PreTrainedModel, found: Conversions) -> list[str]:
    buffers = [name for name, _ in model.named_buffers()]
    outdated = {pattern for pattern in OUTDATED if any(re.search(pattern, name) for name in buffers)}
    ignored = outdated | _patterns(model._keys_to_ignore_on_load_unexpected)
    kept = set(_others(found.left_over.values(), ignored))
    return [name for name, renamed in found.left_over.items() if renamed in kept]


def _patterns(listed: Collection[str] | None) -> set[str]:
    """Patterns that a class of transformers lists: a set since 5.7, a list or None before."""
    return set(listed or ())


def _tied_but_different(
    weights: Mapping[str, torch.Tensor], found: Conversions, tensors: Mapping[str, torch.Tensor]
) -> list[str]:
    """Pairs of names of one tied parameter for which the checkpoint holds different values."""
    seen: dict[int, tuple[str, torch.Tensor]] = {}
    apart = []
    for recipe in found.recipes:
        if recipe.converter is not None:
            continue
        mine = tensors[recipe.names[0]]
        name, theirs = seen.setdefault(id(weights[recipe.target]), (recipe.target, mine))
        if mine.data_ptr() != theirs.data_ptr() and not torch.equal(mine, theirs):
            apart.append(f"{name} and {recipe.target}")
    return apart


def _others(names: Iterable[str], patterns: Collection[str]) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _some(lines: list[str], count: int) -> str:
    return ", ".join(lines[:count]) + (f" and {len(lines) - count} more" if len(lines) > count else "")


def _text(model: PreTrainedModel, folder: Path, problems: Problems) -> str:
    message = [f"the checkpoint in {folder} does not fit {type(model).__name__}:"]
    for kind, lines in problems.items():
        if lines:
            listed = "".join(f"\n    {line}" for line in lines[:LISTED])
            more = f"\n    and {len(lines) - LISTED} more" if len(lines) > LISTED else ""
            message.append(f"  {len(lines)} {kind} ({ADVICE[kind]}):{listed}{more}")
    return "\n".join(message)
