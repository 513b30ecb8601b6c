"""``generate`` of a model whose experts are on several ranks: all ranks continue until the last has finished."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ds_npu.models.attributes import set_attribute
from ds_npu.models.hugging_face_model import is_hugging_face

GENERATE, SYNCED = "generate", "synced_gpus"


def generate_synced(model: nn.Module) -> None:
    """Make ``generate`` of transformers' models within ``model`` call forward equally often on all ranks.

    A rank whose sequences have ended still computes experts for other ranks' tokens. transformers does that for ZeRO-3
    (``synced_gpus``), and the Trainer switches it off elsewhere.
    """
    for module in model.modules():
        found: Callable[..., Any] | None = getattr(module, GENERATE, None)
        if is_hugging_face(module) and found is not None and SYNCED in inspect.signature(found).parameters:
            set_attribute(module, GENERATE, functools.partial(_synced, found))


def _synced(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(generate).bind(*args, **kwargs)
    given.arguments[SYNCED] = True
    return generate(*given.args, **given.kwargs)
