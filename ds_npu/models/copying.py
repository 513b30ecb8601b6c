"""copy.deepcopy of a model whose weights or sequences are sharded over ranks: refused."""

from __future__ import annotations

import functools
from typing import NoReturn

from torch import nn

from ds_npu.models.attributes import set_attribute


def refuse_copies(model: nn.Module) -> None:
    """Make ``copy.deepcopy(model)`` raise RuntimeError."""
    # A copy's forwards, which are closures, would call the modules of the original.
    set_attribute(model, "__deepcopy__", functools.partial(_no_copy, type(model).__name__))


def _no_copy(model: str, memory: dict[int, object]) -> NoReturn:
    raise RuntimeError(
        f"{model} is sharded over ranks and cannot be copied: copy it before "
        "deepspeed.initialize, and give the copy to an engine of its own"
    )
