"""Weights that are gathered behind the code that runs next, and are waited for by whoever reads them first.

From the end of a step until its first use a weight is an AwaitedWeight. Its first use, by a layer's forward or by any
code of a script, makes the current stream wait for the buckets that hold it, and makes it an ordinary parameter again.
Metadata (shape, dtype, gradient, hooks) can be read before. Code that torch does not tell of its use (TorchScript,
compiled modules, tensors that share the memory of weights) gets the weights when the step ends.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_npu.comm.pending import Work
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute
from ds_npu.parallel.tensor.shard_access import SERIALIZATION_READS, is_metadata

Operation = Callable[..., Any]


class _Arrival:
    """What one weight waits for, and the class that it has otherwise."""

    def __init__(self, works: Sequence[Work], kind: type[nn.Parameter]) -> None:
        self.works, self.kind = works, kind


ARRIVAL = TensorAttribute[_Arrival]("ds_npu_arrival")


class AwaitedWeight(nn.Parameter):
    """A parameter whose values are on their way."""

    @classmethod
    def __torch_function__(
        cls, func: Operation, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func`` when its weights are there."""
        kwargs = kwargs or {}
        if is_metadata(func) and func not in SERIALIZATION_READS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, AwaitedWeight):
                arrive(each)
        return func(*args, **kwargs)

    # Parameter's own ask torch for nothing that __torch_function__ is called for before they look at the class.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(arrive(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return arrive(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(arrive(self))


@functools.cache
def _awaited(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of parameters of ``kind`` that are awaited."""
    return type(f"Awaited{kind.__name__}", (AwaitedWeight, kind), {})


def await_weight(weight: nn.Parameter, works: Sequence[Work]) -> None:
    """Make ``weight``, which ``works`` write, an AwaitedWeight."""
    kind = type(weight)
    ARRIVAL.set(weight, _Arrival(works, kind))
    object.__setattr__(weight, "__class__", _awaited(kind))


def arrive(weight: nn.Parameter) -> nn.Parameter:
    """Let the current stream wait for ``weight``, an ordinary parameter again; does nothing for others."""
    arrival = ARRIVAL.get(weight)
    if arrival is not None:
        # Each weight of a bucket waits by itself: the stream of its first reader may be another one.
        for work in arrival.works:
            work.wait()
        object.__setattr__(weight, "__class__", arrival.kind)
        ARRIVAL.remove(weight)
    return weight


def is_read_unseen(model: nn.Module) -> bool:
    """Whether ``model`` has modules that read their weights where torch tells nobody: compiled or scripted ones."""
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
