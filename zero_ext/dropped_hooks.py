"""Hooks on parameters that torch_npu drops while ZeRO 1 and 2 flatten a model.

DeepSpeed (0.19.8 runtime/zero/stage_1_and_2.py:1399) flattens parameters that require gradients, and after
torch_npu 2.13's ``flatten_dense_tensors`` the hooks of ``register_hook`` on them are not called any more, nor those
that are registered later, although the parameter still lists them.
"""

from __future__ import annotations

from torch import nn


def attach_hooks_again(model: nn.Module) -> None:
    """Register with autograd again the hooks that the parameters of ``model`` list; none is called twice."""
    for parameter in model.parameters():
        # The setter registers them with autograd.
        if parameter._backward_hooks:
            parameter._backward_hooks = parameter._backward_hooks
