"""Converts a checkpoint's tensors to a model's weights, and tells in one error all that does not fit the model.

Checkpoints may have old names, base-model prefixes, or one tensor for each expert where the model has one for all.
The renamings and conversions are transformers' own. Source: transformers 5,
core_model_loading.convert_and_load_state_dict_in_model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

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

OUTDATED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers in older checkpoints that models compute today (transformers: _adjust_missing_and_unexpected_keys)."""

Problems = dict[str, list[str]]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """How one weight of the model (or several) is built from tensors of the checkpoint."""

    target: str
    """The (first) weight's name in the model."""
    converter: WeightConverter | None
    """None where the only source is the weight itself, unconverted."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """For each pattern of the converter the names in the checkpoint that match it, in the order of the conversion."""

    @property
    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    @property
    def stacked(self) -> bool:
        """Whether index i of the weight's dim 0 is built only from source i of each pattern (expert i)."""
        if self.converter is None:
            return False
        first, *rest = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(isinstance(each, Concatenate) and each.dim > 0 for each in rest)
            and len(self.converter.target_patterns) == 1
        )

    def only(self, index: int) -> Recipe:
        """The recipe for index ``index`` along dim 0 of a stacked weight."""
        one = {pattern: names[index : index + 1] for pattern, names in self.sources.items()}
        return Recipe(self.target, self.converter, one)


@dataclass(frozen=True)
class Conversions:
    """How a checkpoint becomes a model's weights."""

    recipes: list[Recipe]
    left_over: dict[str, str]
    """Tensors that no recipe uses: their name in the checkpoint, and the one they would have in the model."""
    used: list[WeightConverter | WeightRenaming]
    """The conversions of transformers that applied to some name; saving reverts them."""


def conversions(model: PreTrainedModel, wanted: Collection[str], found: Collection[str]) -> Conversions:
    """Match the names ``found`` in a checkpoint with the names ``wanted`` of ``model``, a transformers model."""
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known = dict.fromkeys(wanted, True)
    recipes: dict[str, Recipe] = {}
    left_over = {}
    for name in sorted(found, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = rename_source_key(name, [], [], model.base_model_prefix, known)
        if renamed not in known:
            left_over[name] = renamed
            continue
        recipe = recipes.setdefault(renamed, Recipe(renamed, by_pattern.get(pattern)))
        recipe.sources.setdefault(pattern or name, []).append(name)
    return Conversions(list(recipes.values()), left_over, [each for each in mapping if each.was_used()])


@dataclass(frozen=True)
class Converter:
    """Builds weights by recipes, for a model with the given config."""

    whole_shapes: Mapping[str, torch.Size]
    config: Any

    def get_parameter(self, name: str) -> torch.Tensor:
        """A meta tensor of the whole shape: conversions read only shapes, and the model's own weights may be shards."""
        return torch.empty(self.whole_shapes[name], device="meta")

    def convert(self, recipe: Recipe, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The whole weights that ``recipe`` builds from the checkpoint's ``tensors``, by name in the model."""
        if recipe.converter is None:
            return {recipe.target: tensors[recipe.names[0]]}
        converter = copy.deepcopy(recipe.converter)
        for pattern, names in recipe.sources.items():
            for name in names:
                converter.add_tensor(recipe.target, name, pattern, tensors[name])
        made = converter.convert(recipe.target, model=self, config=self.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def shapes(self, recipe: Recipe, tensors: Tensors) -> dict[str, torch.Size]:
        """The shapes of what ``convert`` returns, by name; reads no values."""
        made = self.convert(recipe, {name: torch.empty_like(tensors[name], device="meta") for name in recipe.names})
        return {name: value.shape for name, value in made.items()}


def check_fit(
    model: PreTrainedModel,
    folder: Path,
    weights: Tensors,
    found: Conversions,
    converter: Converter,
    tensors: Tensors,
) -> set[str]:
    """Return the names of the weights that ``tensors``, the checkpoint in ``folder``, provide.

    ``weights``: the model's parameters and persistent buffers by each of their names. Only the values of tied weights
    are read. Raises CheckpointError that lists every problem.
    """
    problems: Problems = {kind: [] for kind in ADVICE}
    shapes: dict[str, torch.Size] = {}
    for recipe in found.recipes:
        try:
            shapes |= converter.shapes(recipe, tensors)
        except (ValueError, RuntimeError, LookupError, AttributeError) as error:
            problems["not convertible"].append(f"{recipe.target}, from {_some(recipe.names, 4)} ({error})")
    whole = converter.whole_shapes
    given = {id(weights[name]) for name in shapes if name in weights}
    given |= {id(weights[recipe.target]) for recipe in found.recipes}
    missing = [name for name, each in weights.items() if id(each) not in given]
    problems["missing from the checkpoint"] += [
        f"{name} {tuple(whole[name])}" for name in _others(missing, model._keys_to_ignore_on_load_missing or ())
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


def _left_over(model: PreTrainedModel, found: Conversions) -> list[str]:
    buffers = [name for name, _ in model.named_buffers()]
    outdated = {pattern for pattern in OUTDATED if any(re.search(pattern, name) for name in buffers)}
    ignored = outdated.union(model._keys_to_ignore_on_load_unexpected or ())
    kept = set(_others(found.left_over.values(), ignored))
    return [name for name, renamed in found.left_over.items() if renamed in kept]


def _tied_but_different(weights: Tensors, found: Conversions, tensors: Tensors) -> list[str]:
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
