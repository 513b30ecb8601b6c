"""Access control of one rank's shard of a weight: only ds_npu, DeepSpeed and optimizers may compute with it.

A shard looks like a weight. Code that knows nothing of tensor parallelism and multiplies by it (a fused loss that reads
the head's weight, a penalty over all parameters) would silently compute something else than one process does. So the
parameters of a sharded model are ``ShardedParameter``s, and those of its sharded experts ``GuardedParameter``s.
Any code can read their metadata (shape, dtype, device, ...); a computation by other code raises ShardAccessError,
which names the weight and the reader. Copies are ``ShardCopy``s under the same rules, so that shards can be kept and
restored, but not saved as a model's weights.

The attribute of a module that holds a sharded weight (``lm_head.weight``) reads as the whole one: ``whole_weight.py``.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_npu.parallel.runtime.arrival import arrive
from ds_npu.parallel.runtime.calls import Arguments, Keywords, Operation
from ds_npu.parallel.runtime.micro_batch import is_in_backward
from ds_npu.parallel.tensor.sharding import Sharding

INTERNAL = ("ds_npu", "deepspeed")
"""Packages that may compute with shards."""
OPTIMIZERS = "torch.optim"
INTERMEDIARIES = ("torch", "torch_npu", "contextlib", "functools", "copy", "pickle")
"""Packages that compute on behalf of their caller."""
MODES = ("__torch_function__", "__torch_dispatch__")
"""Functions, in any package, that compute on behalf of their caller."""
ENTRY_MODULES = (
    *("ds_npu.parallel.tensor.shard_access", "ds_npu.parallel.tensor.whole_weight"),
    "ds_npu.parallel.tensor.awaited_weights",
)
"""The modules that are called when a shard is used; the reader is found among their callers."""

VALUES = ("data", "T", "H", "mT", "mH", "real", "imag")
"""Attributes of a tensor that depend on its values; all others are metadata."""
METADATA = {
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "__len__"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_shared", "is_pinned", "is_same_size", "get_device"),
    *("requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook"),
    *("_has_compatible_shallow_copy_type", "data_ptr", "untyped_storage", "storage", "_typed_storage"),
}
"""Functions that do not read a tensor's values (addresses show which weights are tied)."""
SERIALIZATION_READS = {
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor._typed_storage,
}
"""Metadata for writing a tensor to a file: other code may not read these of a ShardCopy."""
COPIES = {
    *("detach", "clone", "contiguous", "to", "cpu", "cuda", "npu", "pin_memory"),
    *("float", "double", "half", "bfloat16", "__get__:data"),
}
"""Functions that copy a shard."""
REPLACE = {"copy_", "__set__:data"}
"""Functions that overwrite a shard; other code may use them with a copy of the same shard."""


@dataclass(frozen=True)
class Shard:
    """The whole of which a tensor is one rank's shard."""

    described: str
    """A description of the whole and its sharding, for errors."""
    remedy: str
    """The advice in errors: an alternative to computing with the shard."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()  # A tensor read from a file is no shard of this model.


@dataclass(frozen=True)
class WeightShard(Shard):
    """The weight that a ShardedParameter is a shard of."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole weight."""
    sharding: Sharding
    group: dist.ProcessGroup | None
    """The tensor ranks."""

    @staticmethod
    def of(name: str, shape: Sequence[int], sharding: Sharding, group: dist.ProcessGroup | None) -> WeightShard:
        ranks = f"{len(sharding.ranges)} tensor ranks along dim {sharding.dim} (ds_npu.parallel.tensor)"
        described = f"{name} {list(shape)} is sharded over {ranks}"
        return WeightShard(described, WEIGHT_REMEDY, name, tuple(shape), sharding, group)


WEIGHT_REMEDY = (
    "compute with the attribute of its module (module.weight) inside of the model's forward and outside of its "
    "attentions and MLPs, where it is the whole; or, on every tensor rank, with whole_weight(parameter) of "
    "ds_npu.parallel.tensor.whole_weight; to save, call engine.save_pretrained(folder) or engine.whole_state_dict(). "
    "Or set ds_npu.parallel.tensor to 1"
)


class ShardAccessError(RuntimeError):
    """Raised where other code computes with one tensor rank's shard of a weight as if it were the whole."""


class _Scope(threading.local):
    """A context manager, entered by a call; ``depth`` is how many times the current thread is in it."""

    depth = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


allow_shard_access = _Scope()
"""A context in which all code of this thread may compute with shards: an optimizer, or a user's module."""
model_forward_scope = _Scope()
"""A context for the forward of a sharded model, which every tensor rank runs at the same time."""
region_scope = _Scope()
"""A context for the forward of a module in which tensor ranks hold different tokens, heads or columns."""


def ranks_agree() -> bool:
    """Whether all tensor ranks run the same computation now: in a model's forward, outside of its regions.

    That holds in a backward as well (which may recompute parts of the forward).
    """
    return not region_scope.depth and (model_forward_scope.depth > 0 or is_in_backward())


def is_internal() -> bool:
    """Whether the code that called this module, or ``whole_weight``, may compute with shards."""
    return allow_shard_access.depth > 0 or _outsider() is None


def _outsider() -> FrameType | None:
    """The frame of the code that uses a shard; None where its package may compute with shards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in ENTRY_MODULES:
        frame = frame.f_back
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        package = module.partition(".")[0]
        if package in INTERNAL or module.startswith(OPTIMIZERS):
            return None
        if package not in INTERMEDIARIES and frame.f_code.co_name not in MODES:
            return frame
        frame = frame.f_back
    return None


def refusal(shard: Shard, what: str) -> ShardAccessError:
    """The error for the code that reads ``what`` of a shard."""
    frame = _outsider()
    reader = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else "autograd"
    return ShardAccessError(
        f"{shard.described}; {reader} asks one rank's part for {what}, as if it were the whole. "
        f"What to do: {shard.remedy}"
    )


@functools.lru_cache(maxsize=1024)
def _name(func: Any) -> str:
    """The name of ``func``: ``size``, or ``__get__:data`` for an attribute."""
    name = str(func.__name__)
    if name not in ("__get__", "__set__", "__delete__"):
        return name
    attribute = func.__self__
    plain = attribute.fget.__name__ if isinstance(attribute, property) and attribute.fget else attribute.__name__
    return f"{name}:{plain}"


@functools.lru_cache(maxsize=1024)
def is_metadata(func: Operation) -> bool:
    """Whether ``func`` does not read the values of its tensors."""
    kind, _, attribute = _name(func).partition(":")
    return attribute not in VALUES if attribute else kind in METADATA


class _Guarded(torch.Tensor):
    """This rank's shard of a weight, or a copy of it."""

    shard: Shard

    @classmethod
    def __torch_function__(
        cls, func: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Call ``func`` with shards among its arguments, if the caller may do that; else raise ShardAccessError."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if (is_metadata(func) and func not in SERIALIZATION_READS) or is_internal():
                return func(*args, **kwargs)
            held = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Guarded)]
            return _for_others(func, args, kwargs, held)

    def __deepcopy__(self, memo: dict[int, ShardCopy]) -> ShardCopy:
        if id(self) not in memo:
            memo[id(self)] = ShardCopy.of(local_shard(self).clone(), self.shard)
        return memo[id(self)]


def _for_others(func: Operation, args: Arguments, kwargs: Keywords, held: list[_Guarded]) -> Any:
    name, shard = _name(func), held[0].shard
    if name == "__repr__":
        return f"one rank's part ({shard.described}): {held[0].detach()!r}"
    if func in SERIALIZATION_READS and not any(isinstance(each, ShardCopy) for each in held):
        return func(*args, **kwargs)
    if name in COPIES:
        copied = func(*args, **kwargs)
        return ShardCopy.of(copied, shard) if isinstance(copied, torch.Tensor) else copied
    values = args[1] if name in REPLACE and len(args) > 1 else None
    if isinstance(values, ShardCopy) and values.shard == shard:
        return func(*args, **kwargs)
    raise refusal(shard, f"its {name.rpartition(':')[2]}")


class GuardedParameter(_Guarded, nn.Parameter):
    """A parameter that holds this rank's shard of a weight."""


class ShardedParameter(GuardedParameter):
    """A GuardedParameter whose weight the tensor ranks can gather."""

    shard: WeightShard


class ShardCopy(_Guarded):
    """A copy of this rank's shard, as ``state_dict()`` returns it to other code than DeepSpeed and ds_npu."""

    @staticmethod
    def of(values: torch.Tensor, shard: Shard) -> ShardCopy:
        made = values.as_subclass(ShardCopy)
        made.shard = shard
        return made


def protect(parameter: nn.Parameter, shard: Shard) -> None:
    """Make ``parameter`` a GuardedParameter in place; with a WeightShard a ShardedParameter."""
    if isinstance(parameter, GuardedParameter):
        return  # Tied, and protected under its first name.
    kind = ShardedParameter if isinstance(shard, WeightShard) else GuardedParameter
    object.__setattr__(parameter, "__class__", kind)
    assert isinstance(parameter, GuardedParameter)
    parameter.shard = shard


def local_shard(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard as a plain tensor in the same memory, without gradient, for code that knows it is a shard."""
    arrive(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach()


# Files that hold a ShardCopy refer to this function by its name.
def _nothing() -> None:
    return None
