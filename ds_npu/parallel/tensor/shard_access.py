"""Who may compute with one tensor rank's shard of a weight: ds_npu, DeepSpeed and optimizers, and nobody else.

A shard looks like a weight. Code that knows nothing of tensor parallelism and multiplies by it (a fused loss that reads
the head's weight, a penalty over all parameters) would compute something else than one process does, and not notice. So
the parameters of a sharded model are ``ShardedParameter``s. Their metadata (shape, dtype, device, ...) can be read by
all; a computation by anybody else raises ShardAccessError, which names the weight and the reader. Copies are
``ShardCopy``s, for which the same holds, so that shards can be kept and put back, but not written as a model's weights.

What a module shows of a sharded weight as an attribute (``lm_head.weight``) is the whole one: ``whole_weight.py``.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_npu.parallel.tensor.sharding import Sharding

INTERNAL = ("ds_npu", "deepspeed")
"""Packages that know a shard when they see one."""
OPTIMIZERS = "torch.optim"
BETWEEN = ("torch", "torch_npu", "contextlib", "functools", "copy", "pickle")
"""Packages that compute on behalf of who calls them."""
MODES = ("__torch_function__", "__torch_dispatch__")
"""So do anybody's modes and tensors."""
ASKED = ("ds_npu.parallel.tensor.shard_access", "ds_npu.parallel.tensor.whole_weight")
"""Where a request arrives."""

VALUES = ("data", "T", "H", "mT", "mH", "real", "imag")
"""Attributes of a tensor that are made of its values; all others are metadata."""
METADATA = {
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "__len__"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_shared", "is_pinned", "is_same_size", "get_device"),
    *("requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook"),
    *("_has_compatible_shallow_copy_type", "data_ptr", "untyped_storage", "storage", "_typed_storage"),
}
"""Functions that say nothing of a tensor's values (addresses tell which weights are tied)."""
WRITTEN = {torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor._typed_storage}
"""Of a copy, these are how it gets into a file."""
COPIES = {
    *("detach", "clone", "contiguous", "to", "cpu", "cuda", "npu", "pin_memory"),
    *("float", "double", "half", "bfloat16", "__get__:data"),
}
"""Functions whose result is the same shard again."""
REPLACE = {"copy_", "__set__:data"}
"""Functions that put values into a shard; they may be those of a copy."""


@dataclass(frozen=True)
class Shard:
    """What a tensor is a part of."""

    described: str
    """The whole, and how it is split: what an error says of it."""
    remedy: str
    """What to do in place of computing with a part."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # A tensor read from a file is no shard of this model.


@dataclass(frozen=True)
class WeightShard(Shard):
    """What a ShardedParameter is a part of."""

    name: str
    """Of the weight, in the model."""
    shape: tuple[int, ...]
    """Of the whole weight."""
    sharding: Sharding
    group: Any
    """The tensor ranks."""

    @staticmethod
    def of(name: str, shape: Sequence[int], sharding: Sharding, group: Any) -> WeightShard:
        ranks = f"{len(sharding.ranges)} tensor ranks along dim {sharding.dim} (ds_npu.parallel.tensor)"
        described = f"{name} {list(shape)} is split over {ranks}"
        return WeightShard(described, WEIGHT_REMEDY, name, tuple(shape), sharding, group)


WEIGHT_REMEDY = (
    "compute with the attribute of its module (module.weight) inside of the model's forward and outside of its "
    "attentions and MLPs, where it is the whole; or, on every tensor rank, with whole_weight(parameter) of "
    "ds_npu.parallel.tensor.whole_weight; to save, call engine.save_pretrained(folder) or engine.whole_state_dict(). "
    "Or set ds_npu.parallel.tensor to 1"
)


class ShardAccessError(RuntimeError):
    """Somebody computes with one tensor rank's shard of a weight as if it were the whole."""


class _Access(threading.local):
    """What this thread is doing."""

    shards = 0
    """Depth of code that is given shards to compute with."""
    forward = 0
    """Depth of forwards of sharded models: every tensor rank is at the same place."""
    region = 0
    """Depth of modules in which tensor ranks compute different things."""


_access = _Access()


@contextmanager
def _inside(what: str) -> Iterator[None]:
    state = vars(_access)
    state[what] = state.get(what, 0) + 1
    try:
        yield
    finally:
        state[what] -= 1


def using_shards() -> Any:
    """Let all that this thread calls compute with shards: an optimizer, or a user's module that was given them."""
    return _inside("shards")


def in_forward() -> Any:
    """A forward of a sharded model, which every tensor rank runs."""
    return _inside("forward")


def in_region() -> Any:
    """A module in which tensor ranks hold different tokens, heads or columns."""
    return _inside("region")


def ranks_agree() -> bool:
    """Whether every tensor rank is here now and computes the same: in a model's forward, outside of its regions.

    In a backward (of what was not kept) every rank is, too.
    """
    return not _access.region and (_access.forward > 0 or torch._C._current_graph_task_id() >= 0)


def is_internal() -> bool:
    """Whether the code that called this module, or ``whole_weight``, may compute with shards."""
    return _access.shards > 0 or _outsider() is None


def _outsider() -> FrameType | None:
    """The frame on whose behalf a shard is asked for something; None where it is one of a package that knows shards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in ASKED:
        frame = frame.f_back
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        package = module.partition(".")[0]
        if package in INTERNAL or module.startswith(OPTIMIZERS):
            return None
        if package not in BETWEEN and frame.f_code.co_name not in MODES:
            return frame
        frame = frame.f_back
    return None


def refusal(shard: Shard, what: str) -> ShardAccessError:
    """The error for whoever asks a shard for ``what``."""
    frame = _outsider()
    reader = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else "autograd"
    return ShardAccessError(
        f"{shard.described}; {reader} asks one rank's part for {what}, as if it were the whole. "
        f"What to do: {shard.remedy}"
    )


@functools.lru_cache(maxsize=1024)
def _name(func: Any) -> str:
    """``size``, or ``__get__:data`` for an attribute."""
    name = str(func.__name__)
    if name not in ("__get__", "__set__", "__delete__"):
        return name
    attribute = func.__self__
    plain = attribute.fget.__name__ if isinstance(attribute, property) and attribute.fget else attribute.__name__
    return f"{name}:{plain}"


@functools.lru_cache(maxsize=1024)
def _is_metadata(func: Any) -> bool:
    kind, _, attribute = _name(func).partition(":")
    return attribute not in VALUES if attribute else kind in METADATA


def _checked(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` of arguments among which are shards, for whoever calls it."""
    with torch._C.DisableTorchFunctionSubclass():
        if (_is_metadata(func) and func not in WRITTEN) or is_internal():
            return func(*args, **kwargs)
        held = [each for each in tree_leaves((args, kwargs)) if isinstance(each, ShardedParameter | ShardCopy)]
        return _for_others(func, args, kwargs, held)


def _for_others(func: Any, args: Any, kwargs: Any, held: list[Any]) -> Any:
    name, shard = _name(func), held[0].shard
    if name == "__repr__":
        return f"one rank's part ({shard.described}): {held[0].detach()!r}"
    if func in WRITTEN and not any(isinstance(each, ShardCopy) for each in held):
        return func(*args, **kwargs)
    if name in COPIES:
        copied = func(*args, **kwargs)
        return ShardCopy.of(copied, shard) if isinstance(copied, torch.Tensor) else copied
    values = args[1] if name in REPLACE and len(args) > 1 else None
    if isinstance(values, ShardCopy) and values.shard == shard:
        return func(*args, **kwargs)
    raise refusal(shard, f"its {name.rpartition(':')[2]}")


class ShardedParameter(nn.Parameter):
    """A parameter that holds this tensor rank's shard of a weight."""

    shard: WeightShard

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _checked(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardCopy:
        return _deep_copy(self, memo)


class ShardCopy(torch.Tensor):
    """This rank's part of something: of a weight, what ``state_dict()`` gives to others than DeepSpeed and ds_npu."""

    shard: Shard

    @staticmethod
    def of(values: torch.Tensor, shard: Shard) -> ShardCopy:
        made = values.as_subclass(ShardCopy)
        made.shard = shard
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _checked(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardCopy:
        return _deep_copy(self, memo)


def _deep_copy(held: ShardedParameter | ShardCopy, memo: dict[int, Any]) -> ShardCopy:
    if id(held) not in memo:
        memo[id(held)] = ShardCopy.of(local_shard(held).clone(), held.shard)
    found: ShardCopy = memo[id(held)]
    return found


def protect(parameter: nn.Parameter, shard: WeightShard) -> None:
    """Let nobody else compute with ``parameter``, which stays the same object."""
    kept: Any = parameter
    if isinstance(parameter, ShardedParameter):
        return  # Tied, and protected under its first name.
    kept.__class__ = ShardedParameter
    kept.shard = shard


def local_shard(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard as a plain tensor without gradient, for those who know what it is; it shares its memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach()


def _nothing() -> None:
    return None
