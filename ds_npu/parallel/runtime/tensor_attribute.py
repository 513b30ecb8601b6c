"""Typed access to attributes of tensors and storages that torch does not declare: marks of ds_npu or DeepSpeed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import GetSetDescriptorType
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
Marked = torch.Tensor | torch.UntypedStorage
_attributes: Callable[[Marked], dict[str, Any]] = vars
# Not getattr and setattr, which subclasses of tensors overload.


class TensorAttribute(Generic[T]):
    """An attribute of single tensors, or storages, with its ``name`` and its type."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self, tensor: Marked) -> T | None:
        """Its value; None where ``tensor`` has no such attribute."""
        found: T | None = _attributes(tensor).get(self.name)
        return found

    def set(self, tensor: Marked, value: T) -> None:
        _attributes(tensor)[self.name] = value

    def remove(self, tensor: Marked) -> None:
        """Nothing happens where ``tensor`` does not have it."""
        _attributes(tensor).pop(self.name, None)

    def is_on(self, tensor: Marked) -> bool:
        """Whether ``tensor`` has the attribute, whatever its value."""
        return self.name in _attributes(tensor)


def tensor_property(name: str) -> GetSetDescriptorType:
    """The descriptor of a property of tensors; its ``__get__`` is what ``__torch_function__`` is given for a read."""
    found: GetSetDescriptorType = inspect.getattr_static(torch._C.TensorBase, name)
    return found
