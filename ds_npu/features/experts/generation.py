"""``generate`` of a model whose experts are on several ranks: all of them go on until the last has finished."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ds_npu.models.attributes import set_attribute
from ds_npu.models.hugging_face_model import is_hugging_face

GENERATE, TOGETHER = "generate", "synced_gpus"


def generate_together(model: nn.Module) -> None:
    """Make ``generate`` of transformers' models within ``model`` call forward as often on each rank as on the others.

    A rank whose sequences have ended still has experts that the others' tokens are sent to. transformers does that for
    ZeRO-3 (``synced_gpus``), and the Trainer switches it off elsewhere.
    """
    for module in model.modules():
        found: Callable[..., Any] | None = getattr(module, GENERATE, None)
        if is_hugging_face(module) and found is not None and TOGETHER in inspect.signature(found).parameters:
            set_attribute(module, GENERATE, functools.partial(_together, found))


def _together(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(generate).bind(*args, **kwargs)
    given.arguments[TOGETHER] = True
    return generate(*given.args, **given.kwargs)
