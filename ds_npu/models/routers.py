"""Tells which classes of a model are routers, and which of their outputs are logits.

transformers 5 names both for each family, as what can be recorded of a model (``PreTrainedModel._can_record_outputs``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

RECORDED, ROUTER_LOGITS = "_can_record_outputs", "router_logits"


def logits_recorders(module: nn.Module) -> Iterator[tuple[type[nn.Module], int]]:
    """Yield the classes of routers that ``module`` names, and which of their outputs are the logits."""
    recorded: Mapping[str, Any] = getattr(module, RECORDED, None) or {}
    recorders = recorded.get(ROUTER_LOGITS)
    for each in recorders if isinstance(recorders, list) else [recorders]:
        kind, index = getattr(each, "target_class", None), getattr(each, "index", None)
        if isinstance(kind, type) and isinstance(index, int):
            yield kind, index


def logits_index(model: nn.Module, router: nn.Module) -> int:
    """The index of the logits among the outputs of ``router``, as transformers tells; 0 where it tells nothing."""
    recorders = (each for module in model.modules() for each in logits_recorders(module))
    return next((index for kind, index in recorders if type(router) is kind), 0)
