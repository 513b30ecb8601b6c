"""ZeRO-3 gathers all weights of a module together, for modules whose inner modules use one another's weights.

DeepSpeed's own way, leaf modules (deepspeed/utils/z3_leaf_module.py), reduces gradients in a full backward hook. For a
module whose tensors are all keyword arguments, as transformers calls its attention, that hook runs before the
module's gradients exist (DeepSpeed 0.19.8 runtime/zero/stage3.py:1534), and they would be dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from deepspeed.runtime.zero.partition_parameters import register_external_parameter
from torch import nn


def _none() -> Iterator[nn.Module]:
    return iter(())


@contextmanager
def gathered_as_one(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While ZeRO-3 adds its hooks to a model, present ``modules`` as if they held their inner modules' weights."""
    whole = list(modules)
    for module in whole:
        for parameter in module.parameters():
            register_external_parameter(module, parameter)
        module.__dict__["children"] = _none
    try:
        yield
    finally:
        for module in whole:
            del module.__dict__["children"]
