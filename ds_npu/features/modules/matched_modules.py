"""The modules of a model that a key's glob names; in pipeline stages, only modules of this rank."""

from __future__ import annotations

from torch import nn

from ds_npu.config.roles import Role
from ds_npu.models import names
from ds_npu.parallel.pipeline.pass_through import PassThrough, pass_throughs


def no_module_is(role: Role, model: nn.Module) -> str:
    """The reason and the remedy of a refusal: a key of the section needs modules of ``role``, and none is known."""
    return (
        f"no module of {type(model).__name__} is known to have the role {role}. What to do: say in ds_npu.plan which "
        f'ones are ({{"<glob over module names>": "{role}"}}), or leave the key out'
    )


def matched_modules(key: str, glob: str, model: nn.Module) -> list[str]:
    """The matched modules in the model's order. Raises ValueError that names ``key`` if no rank has a match."""
    found = {name: module for name, module in model.named_modules() if name and names.matches(glob, name)}
    elsewhere = [name for each in pass_throughs(model).values() for name in each.absent_names]
    if not found and not any(names.matches(glob, name) for name in elsewhere):
        near = names.suggestion(glob, [*dict(model.named_modules()), *elsewhere])
        raise ValueError(f"ds_npu.{key}: {glob!r} matches no module of {type(model).__name__}{near}")
    return [name for name, module in found.items() if not isinstance(module, PassThrough)]
