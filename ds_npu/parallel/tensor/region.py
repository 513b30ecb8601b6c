"""Tensor-parallel regions: where each tensor rank works on its own heads, or its own columns of an MLP.

A region begins where hidden states go into column linears and ends in a row linear. Outside of regions hidden states
are the same on every tensor rank, or, with Megatron sequence parallelism, shards [B, S / tp, H] of the sequence.

A user's module knows nothing of this: it reads the shape of its hidden states, and hands them to its projections. So it
is given a RegionInput, which has the shape of the whole, and which column linears know how to take in without
communicating twice. Whatever else uses it, uses hidden states that have entered the region.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn import functional
from torch.utils._pytree import tree_map

from ds_npu.comm.crossing import collect, copy, gather, shard
from ds_npu.parallel.tensor.axis import SEQUENCE_DIM, TensorAxis
from ds_npu.parallel.tensor.shard_access import in_region

SHAPE_ONLY = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.ndimension,
    torch.Tensor.is_floating_point,
    torch.Tensor.__len__,
    *(vars(torch._C.TensorBase)[name].__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")),
}
"""What may be asked of a RegionInput without its entering the region."""


class SequenceShards:
    """The sequence shards of one model: how long the sequence is of which each rank has a part.

    Sequences that tp does not divide are padded with zeros; the padding never enters a region.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self.axis = axis
        self.batch = self.length = 0

    def shard(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """This rank's [B, ceil(S / tp), H] of hidden states that are the same on every rank."""
        self.batch, self.length = x_BSH.shape[:2]
        return shard(padded(x_BSH, self.axis.size), SEQUENCE_DIM, self.axis.group)

    def see(self, x_BsH: torch.Tensor, positions: Mapping[str, Any]) -> None:
        """Take batch and length from what a region is called with: ``position_ids`` or ``position_embeddings``.

        A region that is recomputed may be of an earlier forward, whose sequences had another length. Where nothing
        tells it, the length is that of the latest forward; raises ValueError where it cannot be.
        """
        self.batch = x_BsH.shape[0]
        if positions.get("position_ids") is not None:
            self.length = positions["position_ids"].shape[-1]
        elif positions.get("position_embeddings") is not None:
            self.length = positions["position_embeddings"][0].shape[-2]
        if -(-self.length // self.axis.size) != x_BsH.shape[SEQUENCE_DIM]:
            raise ValueError(
                f"a sequence shard of {x_BsH.shape[SEQUENCE_DIM]} tokens is recomputed, but the latest forward was of "
                f"{self.length} tokens over {self.axis.size} tensor ranks: call backward before the next forward, or "
                "give the region its position_ids by name"
            )

    def collect(self, x_BsH: torch.Tensor) -> torch.Tensor:
        """[B, S, H], the same on every rank."""
        return self.cut(collect(x_BsH, SEQUENCE_DIM, self.axis.group))

    def cut(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Without padding."""
        return x_BSH if x_BSH.shape[SEQUENCE_DIM] == self.length else x_BSH[:, : self.length]


def padded(x_BSH: torch.Tensor, multiple: int) -> torch.Tensor:
    """``x`` with zeros behind its sequence, to a length that ``multiple`` divides."""
    missing = -x_BSH.shape[SEQUENCE_DIM] % multiple
    return functional.pad(x_BSH, (0, 0, 0, missing)) if missing else x_BSH


class RegionInput(torch.Tensor):
    """Hidden states that are about to enter a region: [B, S, H] to whoever asks for their shape."""

    source: torch.Tensor
    """Hidden states outside of the region: [B, S, H], or a shard of it."""
    axis: TensorAxis
    shards: SequenceShards | None
    _entered: torch.Tensor | None

    @staticmethod
    def of(source: torch.Tensor, axis: TensorAxis, shards: SequenceShards | None) -> RegionInput:
        """``shards`` where ``source`` is one."""
        shape = list(source.shape)
        if shards is not None:
            shape[SEQUENCE_DIM] = shards.length
        # One element in the shape of all of them: there is nothing in it to be read.
        made = source.new_empty(()).expand(shape).as_subclass(RegionInput)
        made.source, made.axis, made.shards, made._entered = source, axis, shards, None
        return made

    def entered(self) -> torch.Tensor:
        """[B, S, H] inside the region, whose gradients are summed over tensor ranks on their way out."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._entered is None:
                if self.shards is None:
                    self._entered = copy(self.source, self.axis.group)
                else:
                    self._entered = self.shards.cut(gather(self.source, SEQUENCE_DIM, self.axis.group))
            return self._entered

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """What was made of all of the source, without the sequence's padding."""
        return x if self.shards is None else self.shards.cut(x)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in SHAPE_ONLY:
                return func(*args, **(kwargs or {}))
            entered = tree_map(lambda each: each.entered() if isinstance(each, RegionInput) else each, (args, kwargs))
            return func(*entered[0], **(entered[1] or {}))


Wrapper = Callable[..., Any]
R = TypeVar("R")


def untraced(function: Callable[..., R]) -> Callable[..., R]:
    """``function``, run as it is where torch.compile traces what calls it.

    torch 2.13 ends in internal errors when it traces collectives in autograd functions and forwards of single modules.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> R:
        return function(*args, **kwargs)

    # torch.compiler.disable does the same, but imports the compiler at once.
    made: Callable[..., R] = _disable_dynamo(run)
    return made


class Around:
    """A forward of its own for one module: ``wrapper(inner, *args, **kwargs)``."""

    def __init__(self, wrapper: Wrapper, inner: Callable[..., Any]) -> None:
        functools.update_wrapper(self, inner)
        self.wrapper, self.inner = wrapper, inner

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper(self.inner, *args, **kwargs)


def around(module: nn.Module, wrapper: Wrapper) -> None:
    """Make ``wrapper(forward, *args, **kwargs)`` the forward of this one module; hooks stay around it."""
    vars(module)["forward"] = Around(wrapper, module.forward)


def innermost(module: nn.Module) -> Callable[..., Any]:
    """The forward of ``module`` without what ``around`` has put around it."""
    forward: Callable[..., Any] = module.forward
    while isinstance(forward, Around):
        forward = forward.inner
    return forward


def replace_innermost(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Make ``forward`` the forward of this one module, within all that ``around`` has put around it."""
    outer: Any = module.forward
    if not isinstance(outer, Around):
        vars(module)["forward"] = Around(_as_it_is, forward)
        return
    while isinstance(outer.inner, Around):
        outer = outer.inner
    outer.inner = forward


def _as_it_is(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def first_argument(module: nn.Module) -> str:
    """The name of the first parameter of ``module``'s forward: its hidden states."""
    return next(iter(inspect.signature(module.forward).parameters))


def with_first(name: str, change: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments whose first one, given by position or by ``name``, is changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, name: change(kwargs[name])}


def join_hidden_states(model: nn.Module, blocks: int, shards: SequenceShards) -> None:
    """Join the shards among what ``model`` returns: the hidden states between its blocks, where they are asked for."""

    def joined(states: Any) -> Any:
        # Before the first block and after the last they are whole.
        if type(states) is tuple and len(states) == blocks + 1 and all(map(_is_hidden_states, states)):
            first, *between, last = states
            return (first, *(None if each is None else shards.collect(each) for each in between), last)
        return states

    def whole(forward: Any, *args: Any, **kwargs: Any) -> Any:
        out: Any = forward(*args, **kwargs)
        if isinstance(out, dict) and "hidden_states" in out:
            out["hidden_states"] = joined(out["hidden_states"])
        return tuple(map(joined, out)) if type(out) is tuple else out

    around(model, whole)


def _is_hidden_states(value: Any) -> bool:
    return value is None or (isinstance(value, torch.Tensor) and value.dim() == 3)


RandomNumbers = Callable[[], AbstractContextManager[Any]]


def make_region(
    module: nn.Module, axis: TensorAxis, shards: SequenceShards | None, random_numbers: RandomNumbers = nullcontext
) -> None:
    """Let ``module``, whose projections are parallel, see its hidden states as a RegionInput.

    ``random_numbers`` are those of the region.
    """
    name = first_argument(module)

    def enter(x: torch.Tensor, positions: Mapping[str, Any]) -> RegionInput:
        if shards is not None:
            check_sequences(x, type(module).__name__)
            shards.see(x, positions)
        return RegionInput.of(x, axis, shards)

    def region(forward: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_first(name, lambda x: enter(x, kwargs), args, kwargs)
        with random_numbers(), in_region():
            return forward(*args, **kwargs)

    around(module, region)


def check_sequences(x: torch.Tensor, who: str) -> None:
    """Raise ValueError where what is shown to ``who`` as hidden states, or a shard of them, has no sequence dim."""
    if x.dim() != 3:
        raise ValueError(
            f"ds_npu.parallel.sequence_parallel: found hidden states {list(x.shape)} in {who}; it needs [batch, "
            "sequence, hidden], and this model flattens them. What to do: sequence_parallel false"
        )


def make_whole(module: nn.Module, shards: SequenceShards, random_numbers: RandomNumbers = nullcontext) -> None:
    """Let ``module``, which stands among sequence shards, work on whole sequences, alike on every rank.

    Gradients of its weights are whole on each rank, too. ``random_numbers`` are those that ranks share.
    """
    name, who = first_argument(module), type(module).__name__

    def whole(forward: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs[name]
        check_sequences(given, who)
        shards.see(given, kwargs)

        def collected(each: Any) -> Any:
            mine = isinstance(each, torch.Tensor) and each.shape == given.shape
            # Modules view what they are given, which they cannot where padding was cut off.
            return shards.collect(each).contiguous() if mine else each

        args, kwargs = tree_map(collected, (args, kwargs))
        with random_numbers():
            out = forward(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        if first.dim() != 3 or first.shape[:2] != (shards.batch, shards.length):
            raise ValueError(
                f"ds_npu.parallel.sequence_parallel: {who} (replicated) returns {list(first.shape)} for "
                f"{shards.batch} sequences of {shards.length} tokens, which is not known how to shard. What to do: "
                "sequence_parallel false"
            )
        return (shards.shard(first), *out[1:]) if isinstance(out, tuple) else shards.shard(first)

    around(module, whole)


def make_sequence(blocks: list[nn.Module], shards: SequenceShards, random_numbers: RandomNumbers = nullcontext) -> None:
    """Shard hidden states where they go into the first of ``blocks``; join them where they leave the last."""

    def block(forward: Any, *args: Any, **kwargs: Any) -> Any:
        with random_numbers(), in_region():
            return forward(*args, **kwargs)

    def first(forward: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_first(name, shards.shard, args, kwargs)
        return forward(*args, **kwargs)

    def last(forward: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        return (shards.collect(out[0]), *out[1:]) if isinstance(out, tuple) else shards.collect(out)

    for each in blocks:
        around(each, block)
    name = first_argument(blocks[0])
    around(blocks[0], first)
    around(blocks[-1], last)
