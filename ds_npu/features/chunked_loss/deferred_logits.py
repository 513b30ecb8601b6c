"""Deferred logits: a head returns their source, from which they are computed a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ds_npu.models.logits import AbsentLogits
from ds_npu.parallel.tensor.shard_access import Arguments, Keywords, Operation

ELEMENTWISE = {"mul", "__mul__", "__rmul__", "div", "true_divide", "__truediv__", "tanh", "float", "to", "contiguous"}
"""Elementwise functions that a model may call between its head and its loss; they run chunk by chunk."""
NUMBERS = (int, float, torch.dtype, torch.device)


@dataclass(frozen=True)
class Operations:
    """Functions that a model called of its logits, with their other arguments, in order."""

    calls: tuple[tuple[Operation, Arguments, Keywords], ...] = ()

    def __call__(self, product_CV: torch.Tensor) -> torch.Tensor:
        for function, args, kwargs in self.calls:
            product_CV = function(product_CV, *args, **kwargs)
        return product_CV

    def then(self, function: Operation, args: Arguments, kwargs: Keywords) -> Operations:
        return Operations((*self.calls, (function, args, kwargs)))

    def __bool__(self) -> bool:
        return bool(self.calls)


@dataclass(frozen=True)
class Source:
    """The head, hidden states and operations that deferred logits will be computed from."""

    head: nn.Module
    hidden: torch.Tensor
    """[..., H]."""
    operations: Operations = Operations()


class DeferredLogits(AbsentLogits):
    """Logits [..., V] of a head that was not called: its input, and the operations on its output."""

    source: Source

    @classmethod
    def of(cls, source: Source, shape: Sequence[int], dtype: torch.dtype, described: str) -> DeferredLogits:
        made = cls.like(shape, dtype, source.hidden.device, described)
        made.source = source
        return made

    @classmethod
    def __torch_function__(
        cls, func: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        own, *others = args if args and isinstance(args[0], cls) else (None,)
        with torch._C.DisableTorchFunctionSubclass():
            if own is not None and _is_elementwise(func, [*others, *(kwargs or {}).values()]):
                return own._then(func, tuple(others), kwargs or {})
            if own is not None and func is torch.Tensor.detach:
                return DeferredLogits.of(own.source, own.shape, own.dtype, own.described)
        return super().__torch_function__(func, types, args, kwargs)

    def _then(self, function: Operation, args: Arguments, kwargs: Keywords) -> DeferredLogits:
        dtype = function(torch.ones((), dtype=self.dtype, device=self.device), *args, **kwargs).dtype
        source = replace(self.source, operations=self.source.operations.then(function, args, kwargs))
        return DeferredLogits.of(source, self.shape, dtype, self.described)


def _is_elementwise(function: Callable[..., Any], others: Sequence[object]) -> bool:
    return function.__name__ in ELEMENTWISE and all(isinstance(each, NUMBERS) for each in others)
