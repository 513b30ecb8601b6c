"""Substitutes for a tensor that is saved for backward: the tensor itself, or a way to have it again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


class ModifiedTensorError(RuntimeError):
    """A tensor that backward needs has been modified in place since it was saved."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__(f"a tensor {list(shape)} that backward needs has been modified in place since it was saved")


class HeldTensor(ABC):
    """A substitute for a saved tensor."""

    @abstractmethod
    def get(self) -> torch.Tensor:
        """Return the tensor; raises ModifiedTensorError where it was modified since it was saved."""


@dataclass(frozen=True)
class KeptTensor(HeldTensor):
    """A tensor that is kept as it is, and its version when it was saved."""

    tensor: torch.Tensor
    version: int
    is_detached: bool
    """Whether the graph was removed from ``tensor``; ``get`` then returns one that requires a gradient."""

    def get(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise ModifiedTensorError(self.tensor.shape)
        return self.tensor.detach().requires_grad_() if self.is_detached else self.tensor


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without its graph and with its version counter, also within a dispatch mode."""
    # Below autograd, within a dispatch mode, a detached tensor would have a counter of its own.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def keep(tensor: torch.Tensor) -> HeldTensor:
    """Hold ``tensor`` itself, without its graph: a node that saves its own output would keep itself alive."""
    if type(tensor) is torch.Tensor and not tensor.is_leaf:
        return KeptTensor(alias(tensor), tensor._version, is_detached=True)
    return KeptTensor(tensor, tensor._version, is_detached=False)
