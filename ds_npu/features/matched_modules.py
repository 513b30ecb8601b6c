"""The modules of a model that a key's glob names; in pipeline stages, those of them that this rank has."""

from __future__ import annotations

from torch import nn

from ds_npu.models import names
from ds_npu.parallel.pipeline.pass_through import PassThrough, pass_throughs


def matched_modules(key: str, glob: str, model: nn.Module) -> list[str]:
    """In the model's order. Raises ValueError, naming ``key``, for a glob that matches nothing on any rank."""
    found = {name: module for name, module in model.named_modules() if name and names.matches(glob, name)}
    elsewhere = (name for each in pass_throughs(model).values() for name in each.absent_names)
    if not found and not any(names.matches(glob, name) for name in elsewhere):
        raise ValueError(f"ds_npu.{key}: {glob!r} matches no module of {type(model).__name__}")
    return [name for name, module in found.items() if not isinstance(module, PassThrough)]
