"""A model's modules by the names they have without PEFT, and the factors that PEFT adds."""

from __future__ import annotations

from functools import cached_property

from torch import nn

from ds_npu.config.roles import Role
from ds_npu.models import kinds, names
from ds_npu.parallel.pipeline.pass_through import PassThrough

FACTOR_ATTRIBUTES = {
    "lora_A": Role.LORA_A,
    "lora_B": Role.LORA_B,
    "lora_embedding_A": Role.LORA_A,
    "lora_embedding_B": Role.LORA_B,
}
"""Attributes in which PEFT keeps the factors of an adapter, next to the layer that it is added to."""


def adapters(model: nn.Module) -> dict[str, Role]:
    """The factors of the LoRA adapters in ``model``."""
    found: dict[str, Role] = {}
    for name, module in model.named_modules():
        inner = dict(module.named_children())
        if names.BASE_LAYER not in inner:
            continue
        for attribute in FACTOR_ATTRIBUTES.keys() & inner.keys():
            factors = (f"{name}.{attribute}.{adapter}" for adapter, _ in inner[attribute].named_children())
            found.update(dict.fromkeys((f"{name}.{attribute}", *factors), FACTOR_ATTRIBUTES[attribute]))
    return {name: role for name, role in found.items() if kinds.own_shapes(model.get_submodule(name))}


class Tree:
    """The modules of ``model``: where PEFT has put one around another, both have the inner one's plain name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.adapters = frozenset(adapters(model))

    @cached_property
    def reals(self) -> dict[str, list[str]]:
        """The full names of each plain name: several where PEFT keeps copies; modules of other stages are left out."""
        found: dict[str, list[str]] = {}
        for name, module in self.model.named_modules():
            inner = dict(module.named_children())
            wraps = not inner.keys().isdisjoint((names.BASE_LAYER, names.ORIGINAL, names.COMPILED))
            if not wraps and name not in self.adapters and not isinstance(module, PassThrough):
                found.setdefault(names.plain(name), []).append(name)
        return found

    @cached_property
    def _children(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        for name in filter(None, self.reals):
            found.setdefault(names.parent(name), {})[name.rpartition(".")[2]] = name
        return found

    def within(self, name: str) -> dict[str, str]:
        """The plain names of the modules directly in the module of plain name ``name``, by attribute."""
        return self._children.get(name, {})

    @cached_property
    def _modules(self) -> dict[str, nn.Module]:
        return dict(self.model.named_modules())

    def module(self, name: str) -> nn.Module:
        return self._modules[self.reals[name][-1]]

    def find(self, module: nn.Module) -> str:
        """The plain name of ``module``."""
        return names.plain(next(name for name, each in self.model.named_modules() if each is module))
