"""Modules of a sharded model that cannot compute on a sequence shard and are given the whole sequence."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ds_npu.config.roles import Role
from ds_npu.models import kinds, names
from ds_npu.models.plan import ModelPlan

LISTS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward of their own."""


def need_whole_sequences(plan: ModelPlan, modules: Mapping[str, nn.Module]) -> list[str]:
    """The outermost modules in blocks of which nothing is sharded and that may mix tokens.

    ``modules`` are all of the model's, by name. Such modules are ``replicated``, or have no weights and so no role.
    """
    free = [name for name in modules if plan.of(name) is None and plan.sublayer(name) is None]
    found = dict.fromkeys(_outermost_whole(plan, modules, name) for name in (*plan.named(Role.REPLICATED), *free))
    return [name for name in found if name is not None and not _works_on_shards(modules[name])]


def _outermost_whole(plan: ModelPlan, modules: Mapping[str, nn.Module], name: str) -> str | None:
    """The outermost module around ``name`` in its block of which nothing is sharded; None outside of blocks."""
    block = plan.block(name)
    if block is None:
        return None
    in_block = [each for each in (name, *names.ancestors(name)) if each != block and names.is_inside(each, block)]
    roles = ({plan.of(inner) for inner in (each, *plan.inside(each))} for each in in_block)
    whole = [each for each, found in zip(in_block, roles, strict=True) if found <= {Role.REPLICATED, None}]
    return next((each for each in reversed(whole) if not isinstance(modules[each], LISTS)), None)


def _works_on_shards(module: nn.Module) -> bool:
    """Whether ``module`` computes each token by itself. A module with experts does not: its loss counts all tokens."""
    return all(kinds.works_on_tokens(each) and not kinds.is_sparse(each) for each in module.modules())
