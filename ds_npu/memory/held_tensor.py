"""What stands for a tensor that is saved for backward: itself, or a way to have it again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


class ModifiedTensorError(RuntimeError):
    """A tensor that backward needs has been modified in place since it was saved."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__(f"a tensor {list(shape)} that backward needs has been modified in place since it was saved")


class HeldTensor(ABC):
    """In place of a saved tensor."""

    @abstractmethod
    def get(self) -> torch.Tensor:
        """The tensor; raises ModifiedTensorError where it is not as it was saved."""


@dataclass(frozen=True)
class KeptTensor(HeldTensor):
    """A tensor that is kept as it is, and its version then."""

    tensor: torch.Tensor
    version: int
    is_detached: bool
    """Whether it stands for one that requires a gradient."""

    def get(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise ModifiedTensorError(self.tensor.shape)
        return self.tensor.detach().requires_grad_() if self.is_detached else self.tensor


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without its graph, and with its count of modifications, also where a dispatch mode asks."""
    # Within one, below autograd, a detached tensor would count its own.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def keep(tensor: torch.Tensor) -> HeldTensor:
    """``tensor`` as it is, but for its graph: the node that has made a tensor may save it, and would hold itself."""
    if type(tensor) is torch.Tensor and not tensor.is_leaf:
        return KeptTensor(alias(tensor), tensor._version, is_detached=True)
    return KeptTensor(tensor, tensor._version, is_detached=False)
