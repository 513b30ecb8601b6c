"""Converts a checkpoint's tensors to a model's weights, by transformers' own renamings and conversions.

Checkpoints may have old names, base-model prefixes, or one tensor for each expert where the model has one for all.
Source: transformers 5, core_model_loading.convert_and_load_state_dict_in_model.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
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

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """How one weight of the model (or several) is built from tensors of the checkpoint."""

    target: str
    """The (first) weight's name in the model."""
    converter: WeightConverter | None
    """None where the one source is the weight."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Names in the checkpoint by the converter's pattern that they match, in the order of the conversion."""

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
        """The recipe of index ``index`` of dim 0 of a stacked weight."""
        one = {pattern: names[index : index + 1] for pattern, names in self.sources.items()}
        return Recipe(self.target, self.converter, one)


@dataclass(frozen=True)
class Conversions:
    """How a checkpoint becomes a model's weights."""

    recipes: list[Recipe]
    left_over: dict[str, str]
    """Tensors of no recipe: from their name in the checkpoint to the one that they would have in the model."""
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
        """An empty weight of the whole shape: all that conversions read of a model, whose own weights may be shards."""
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
