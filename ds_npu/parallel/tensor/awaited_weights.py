"""Weights that are gathered while further code runs; the first read of a weight waits for it.

From the end of a step until its first use a weight is an AwaitedWeight. Its first use, by a layer's forward or by any
code of a script, makes the current stream wait for the messages that write it, and makes it an ordinary parameter
again. Metadata (shape, dtype, gradient, hooks) can be read before. Code whose reads torch does not report (compiled or
scripted modules) reads NaN.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from ds_npu.comm.pending import Work, identity
from ds_npu.parallel.runtime.arrival import ARRIVAL, Arrival, arrive
from ds_npu.parallel.runtime.calls import Arguments, Keywords, Operation
from ds_npu.parallel.tensor.shard_access import SERIALIZATION_READS, is_metadata

OF_MEMORY = {*SERIALIZATION_READS, torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.storage_offset}
"""Metadata that tells of a weight's memory."""


class AwaitedWeight(nn.Parameter):
    """A parameter whose values are on their way."""

    @classmethod
    def __torch_function__(
        cls, func: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Wait for the weights among the arguments, unless ``func`` reads metadata only, and call ``func``."""
        kwargs = kwargs or {}
        if is_metadata(func) and func not in OF_MEMORY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, AwaitedWeight):
                arrive(each)
        return func(*args, **kwargs)

    # Parameter's own methods look at the class before they call torch.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        arrive(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        arrive(self)
        weight: Any = self
        return weight.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub names it Any.
        arrive(self)
        return repr(self)


@functools.cache
def _awaited(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The subclass of ``kind`` for parameters that are awaited."""
    return type(f"Awaited{kind.__name__}", (AwaitedWeight, kind), {})


class AwaitedWeights:
    """The weights of one model that are awaited together, each step."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = weights
        self._placeholders = [_placeholder(weight) for weight in weights]
        self._left = list[nn.Parameter]()
        """Weights up to the last one that may not have arrived."""

    def wait_for(self, works: Callable[[int], Sequence[Work]]) -> None:
        """Make each weight an AwaitedWeight, which the messages ``works(index)`` write."""
        with torch._C.DisableTorchFunctionSubclass():
            for index, (weight, placeholder) in enumerate(zip(self._weights, self._placeholders, strict=True)):
                ARRIVAL.set(weight, Arrival(works(index), weight.data, type(weight)))
                weight.data = placeholder
                object.__setattr__(weight, "__class__", _awaited(type(weight)))
        self._left = list(self._weights)
        own = weakref.ref(self)

        def before_forward(module: nn.Module, args: object) -> None:
            if torch.compiler.is_compiling():
                # The module is another model's, or torch.compile meets the weights themselves, and says so.
                return
            # Others' tensor classes may compute with a module's weights without calling ``__torch_function__``.
            for weight in module._parameters.values():
                if weight is not None:
                    arrive(weight)
            awaited = own()
            if awaited is None or awaited._are_there():
                hook.remove()

        # Every module has the hook, until the last weight has arrived. torch.compile must not trace it; where nothing
        # has imported the tracer yet, it is not imported for this, which would take seconds.
        untraced: Any = torch.compiler.disable if "torch._dynamo" in sys.modules else identity
        hook = register_module_forward_pre_hook(untraced(before_forward))

    def _are_there(self) -> bool:
        """Whether all weights have arrived."""
        while self._left and not ARRIVAL.is_on(self._left[-1]):
            self._left.pop()
        return not self._left

    def arrive(self) -> None:
        """Let the current stream wait for all weights."""
        if not self._are_there():
            for weight in self._weights:
                arrive(weight)


def _placeholder(weight: nn.Parameter) -> torch.Tensor:
    """A tensor like ``weight`` that reads as NaN, of one number in memory."""
    return torch.full((), float("nan"), dtype=weight.dtype, device=weight.device).expand(weight.shape)


def is_read_unseen(model: nn.Module) -> bool:
    """Whether ``model`` has modules whose reads of weights torch does not report: compiled or scripted ones."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
            return True
        if hasattr(module, "_orig_mod"):  # torch.compile's OptimizedModule
            return True
    return False


def uses_of(flat: torch.Tensor) -> int:
    """How many tensors share the memory of ``flat``."""
    count: int = torch._C._storage_Use_Count(flat.untyped_storage()._cdata)
    return count
