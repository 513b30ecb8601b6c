"""Gradients of weights that are whole on every tensor rank, where each rank sees a part of what they are used for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_npu.comm.collectives import all_reduce


def sum_gradient(parameter: nn.Parameter, group: Any) -> None:
    """Sum every gradient of ``parameter`` over ``group``, before it is accumulated and before ZeRO sees it."""
    leaf: Any = parameter  # torch's register_hook has no types
    # One that is frozen may be trained later on; torch takes hooks of what is trained only, and keeps them.
    trained = leaf.requires_grad
    leaf.requires_grad_(True)
    # A copy is summed: the gradient that autograd hands out may be somebody else's as well.
    leaf.register_hook(lambda gradient: all_reduce(_own(gradient), group).wait())
    leaf.requires_grad_(trained)


def _own(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clone(memory_format=torch.contiguous_format)
