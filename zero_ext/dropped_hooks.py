"""Hooks on parameters that torch_npu loses while ZeRO 1 and 2 take a model.

DeepSpeed (0.19.8 runtime/zero/stage_1_and_2.py:1399) flattens parameters that require gradients, and after
torch_npu 2.13's ``flatten_dense_tensors`` the hooks of ``register_hook`` on them are not called any more, nor those
that are registered later, although the parameter still lists them.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def attach_hooks_again(model: nn.Module) -> None:
    """Let autograd know again of the hooks that the parameters of ``model`` list. Changes nothing that works."""
    for parameter in model.parameters():
        leaf: Any = parameter
        # Setting them is what registers them with autograd.
        if leaf._backward_hooks:
            leaf._backward_hooks = leaf._backward_hooks
