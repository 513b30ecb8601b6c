"""Attention between its projections, computed again in backward: only the inputs of its function are kept.

transformers' models find the function in a registry, by the name in their config. A recomputed model is given a name of
its own, whose function calls the one of the name before within a Recomputation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ds_npu.features.build import Build
from ds_npu.features.declaration import Change
from ds_npu.features.modules.attention_exchange import exchanges_of_attention
from ds_npu.features.recompute.recomputed_calls import KEY, is_recomputed, recomputation_of
from ds_npu.models.attention_function import (
    Implementation,
    check_interface,
    implementation_of,
    register,
)
from ds_npu.models.attributes import attribute, attributes, with_plain_weights
from ds_npu.models.hugging_face_model import transformers_module
from ds_npu.parallel.runtime.micro_batch import is_in_backward

EAGER = "eager"
EAGER_FUNCTION = "eager_attention_forward"
"""The function that transformers' attentions call for "eager", defined in the module of their class."""
ONE_KERNEL = ("sdpa", "ds_npu")
"""Implementations that keep no scores."""

Attend = Callable[..., Any]
"""``attend(module, query, key, value, mask, **arguments)``."""


def attention_changes(build: Build, inside: Sequence[str]) -> Sequence[Change]:
    """Changes that recompute the model's attentions in backward; ``inside``: modules that are recomputed as a whole.

    Raises ValueError where the model does not call attention by transformers' interface.
    """
    model = build.model
    try:
        check_interface(model)
    except (TypeError, ValueError) as error:
        raise ValueError(f"ds_npu.{KEY}.attention_core: {error}. What to do: leave it out") from error
    whole = {id(each) for name in inside for each in model.get_submodule(name).modules()}
    found = implementation_of(model)
    if found in ONE_KERNEL:
        build.notes.append(f"{KEY}.attention_core: attention is {found}, which keeps no scores: little is saved")

    def make() -> None:
        register(model, _recomputed(model, whole, build.device_type))

    return exchanges_of_attention(model, "computed again in backward", make)


def _recomputed(model: nn.Module, whole: set[int], device_type: str) -> Implementation:
    """The model's implementation, recomputed in backward except in attentions whose ids are in ``whole``."""
    name = implementation_of(model)
    functions = transformers_module("modeling_utils").ALL_ATTENTION_FUNCTIONS
    masks = transformers_module("masking_utils").ALL_MASK_ATTENTION_FUNCTIONS

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function: Attend = _eager_function(module) if name == EAGER else functions[name]
        if id(module) in whole or not is_recomputed(module):
            return function(module, *args, **kwargs)
        # The forward of a sharded attention has its weights (sinks) as plain tensors. In backward ZeRO-3 has gathered
        # them anew.
        plain = attributes(module, torch.Tensor).keys() & module._parameters.keys()

        def again(*args: Any, **kwargs: Any) -> Any:
            with with_plain_weights(module, plain if is_in_backward() else ()):
                return function(module, *args, **kwargs)

        return recomputation_of(again, device_type)(*args, **kwargs)

    return Implementation(f"ds_npu_recomputed_{name}_{id(model)}", attend, masks[name])


def _eager_function(attention: nn.Module) -> Attend:
    found = attribute(sys.modules[type(attention).__module__], EAGER_FUNCTION, object)
    if not callable(found):
        raise ValueError(
            f"ds_npu.{KEY}.attention_core: {type(attention).__module__} has no {EAGER_FUNCTION}, which "
            f"{type(attention).__name__} would call. What to do: leave it out, or attn_implementation='sdpa'"
        )
    return found
