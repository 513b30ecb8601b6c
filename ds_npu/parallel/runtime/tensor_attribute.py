"""Typed access to attributes of tensors and storages that torch does not declare: marks of ds_npu or DeepSpeed."""

from __future__ import annotations

import inspect
from types import GetSetDescriptorType
from typing import Generic, TypeVar

import torch

from ds_npu.parallel.runtime.marks import held

T = TypeVar("T")
Marked = torch.Tensor | torch.UntypedStorage


class TensorAttribute(Generic[T]):
    """An attribute of single tensors, or storages, with its ``name`` and its type."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self, tensor: Marked) -> T | None:
        """The value on ``tensor``; None where it does not have the attribute."""
        found: T | None = held(tensor).get(self.name)
        return found

    def set(self, tensor: Marked, value: T) -> None:
        held(tensor)[self.name] = value

    def remove(self, tensor: Marked) -> None:
        """Remove the attribute from ``tensor``, if it has it."""
        held(tensor).pop(self.name, None)

    def is_on(self, tensor: Marked) -> bool:
        """Whether ``tensor`` has the attribute, whatever its value."""
        return self.name in held(tensor)


def tensor_property(name: str) -> GetSetDescriptorType:
    """The descriptor of a property of tensors; for a read ``__torch_function__`` gets its ``__get__``."""
    found: GetSetDescriptorType = inspect.getattr_static(torch._C.TensorBase, name)
    return found
