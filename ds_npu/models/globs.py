"""The plan of any model: transformers' structure, where there is one, overridden by the globs of ``ds_npu.plan``."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from torch import nn

from ds_npu.config.roles import Role
from ds_npu.models import kinds, names
from ds_npu.models.draft import Draft, finished, partial_plan
from ds_npu.models.hugging_face_plan import draft_of
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.pipeline.pass_through import PassThrough


def plan_for(model: nn.Module, globs: Mapping[str, str]) -> ModelPlan:
    """The plan of ``model``, for which ``globs`` (from a glob over module names to a role) decide, the last one first.

    Modules that no glob matches keep their role in the Hugging Face model that ``model`` is or holds. ``replicated``
    also holds for everything inside of the module. Raises PlanError with everything that is wrong.
    """
    draft = draft_of(model)
    return finished(model, draft, [each for item in globs.items() for each in _assign(draft, model, *item)])


def partial_plan_for(model: nn.Module, globs: Mapping[str, str]) -> ModelPlan:
    """The plan of ``model``, in which unknown modules have no role: enough where no weights are sharded.

    Raises PlanError with what is wrong with ``globs``.
    """
    draft = draft_of(model)
    return partial_plan(model, draft, [each for item in globs.items() for each in _assign(draft, model, *item)])


def _assign(draft: Draft, model: nn.Module, glob: str, value: str) -> Iterator[str]:
    """Give the role named ``value`` to the modules that ``glob`` matches; yield what is wrong with either."""
    matched = {name: module for name, module in model.named_modules() if names.matches(glob, name)}
    if not matched:
        yield f'"{glob}": matches no module{names.suggestion(glob, dict(model.named_modules()))}'
    if value not in list(Role):
        near = difflib.get_close_matches(value, list(Role), n=1)
        hint = f", did you mean {str(near[0])!r}?" if near else ""
        yield f'"{glob}": {value!r} is no role{hint} (roles: {", ".join(Role)})'
        draft.doubtful.update(matched)
    elif matched:
        role = Role(value)
        # Modules of another pipeline stage have their role there.
        here = {name: module for name, module in matched.items() if not isinstance(module, PassThrough)}
        chosen = list(_chosen(here, role))
        if here and not chosen:
            name, module = next(iter(here.items()))
            found = f"{name} ({kinds.described(module)})"
            yield f'"{glob}": {role} is for modules with parameters; what matches, as {found}, has none of its own'
        for name in chosen:
            draft.roles[name] = role
        draft.given.update(chosen)


def _chosen(matched: dict[str, nn.Module], role: Role) -> Iterator[str]:
    for name, module in matched.items():
        if role is Role.REPLICATED:
            inside = module.named_modules(prefix=name)
            yield from (inner for inner, each in inside if not isinstance(each, PassThrough))
        elif kinds.counts(module, role):
            yield name
