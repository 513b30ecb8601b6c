"""Tensor-parallel regions: where each tensor rank computes its own heads, or its own columns of an MLP.

A region begins where hidden states enter column linears and ends in a row linear (Megatron-LM, arXiv:1909.08053).
Outside of regions hidden states are the same on every tensor rank, or, with Megatron sequence parallelism
(arXiv:2205.05198), shards [B, S / tp, H] of the sequence.

A user's module knows nothing of this: it reads the shape of its hidden states, and passes them to its projections. So
it is given a RegionInput, which has the shape of the whole hidden states, and which grouped column linears gather with
one collective. Any other operation on it uses hidden states that have entered the region.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ds_npu.comm.crossing import copy, gather
from ds_npu.parallel.runtime.calls import Arguments, Keywords, Operation
from ds_npu.parallel.runtime.forward_wraps import (
    Forward,
    Level,
    P,
    R,
    first_parameter_name,
    replace_first_argument,
    wrap_forward,
)
from ds_npu.parallel.runtime.micro_batch import LEAVING_LENGTH, carried_by, new_forward, running, within
from ds_npu.parallel.runtime.tensor_attribute import tensor_property
from ds_npu.parallel.tensor.axis import SEQUENCE_DIM, TensorAxis
from ds_npu.parallel.tensor.sequence_shards import SequenceParallel, SequenceShards, whole_length
from ds_npu.parallel.tensor.shard_access import region_scope

SHAPE_ONLY: set[Operation] = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.ndimension,
    torch.Tensor.is_floating_point,
    torch.Tensor.__len__,
    *(tensor_property(name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")),
}
"""Operations on a RegionInput that do not make it enter the region."""


RESIDUAL = "residual"
"""The parameter of an attention or MLP for a residual, which the module adds to its output (BLOOM)."""
BEFORE_BACKWARD_ENDS = "PostBackwardFunctionModuleBackward"
"""The name of the graph node that ZeRO-3 puts on each tensor argument of a module.

A tensor that is passed twice becomes two tensors with the same memory (deepspeed/runtime/zero/parameter_offload.py).
"""
OF_EACH_TOKEN = "per_layer_input"
"""The parameter of a block (Gemma 3n and 4) for inputs [B, S, ...] that the block itself uses, outside of regions."""


class RegionInput(torch.Tensor):
    """Hidden states that are about to enter a region: their shape is [B, S, H], even where ``source`` is a shard."""

    source: torch.Tensor
    """Hidden states outside of the region: [B, S, H], or a shard of it."""
    axis: TensorAxis
    shards: SequenceShards | None
    projected: dict[object, torch.Tensor]
    """The outputs of grouped linears that the first one's call computed and that are not returned yet, by linear."""
    _entered: torch.Tensor | None

    @staticmethod
    def of(source: torch.Tensor, axis: TensorAxis, shards: SequenceShards | None) -> RegionInput:
        """The input of a region; with ``shards``, ``source`` is a sequence shard."""
        shape = list(source.shape)
        if shards is not None:
            shape[SEQUENCE_DIM] = shards.length
        # One element, expanded to the whole shape: no memory, and no values to read.
        made = source.new_empty(()).expand(shape).as_subclass(RegionInput)
        made.source = source
        made.axis = axis
        made.shards = shards
        made.projected = {}
        made._entered = None
        return made

    def entered(self) -> torch.Tensor:
        """[B, S, H] inside of the region; its gradient is summed over the tensor ranks."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._entered is None:
                if self.shards is None:
                    self._entered = copy(self.source, self.axis.group)
                else:
                    self._entered = self.shards.unpad(gather(self.source, SEQUENCE_DIM, self.axis.group))
            return self._entered

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [B, S, ...], computed from the gathered source, without the padding of the sequence."""
        return x if self.shards is None else self.shards.unpad(x)

    @classmethod
    def __torch_function__(
        cls, func: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in SHAPE_ONLY:
                return func(*args, **(kwargs or {}))
            entered = tree_map(lambda each: each.entered() if isinstance(each, RegionInput) else each, (args, kwargs))
            return func(*entered[0], **(entered[1] or {}))


def join_hidden_states(model: nn.Module, blocks: int, sequences: SequenceParallel) -> None:
    """Gather the sequence shards in the ``hidden_states`` of the output of ``model``: the states between its blocks."""

    def collected(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        return sequences.find(carried_by(x) or running(), x.shape[SEQUENCE_DIM]).collect(x)

    def joined(states: Any) -> Any:
        # The states before the first block and after the last are whole already.
        if type(states) is tuple and len(states) == blocks + 1 and all(map(_is_hidden_states, states)):
            first, *between, last = states
            return (first, *map(collected, between), last)
        return states

    def whole(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if isinstance(out, dict) and "hidden_states" in out:
            out["hidden_states"] = joined(out["hidden_states"])
        return tuple(map(joined, out)) if type(out) is tuple else out

    wrap_forward(model, whole, Level.REGION)


def _is_hidden_states(value: Any) -> bool:
    return value is None or (isinstance(value, torch.Tensor) and value.dim() == 3)


RandomNumbers = Callable[[], AbstractContextManager[None]]
"""A function that makes the context of a module's random numbers (``RegionRandomness``)."""


def make_region(
    module: nn.Module,
    axis: TensorAxis,
    sequences: SequenceParallel | None,
    random_numbers: RandomNumbers = nullcontext,
) -> None:
    """Make the forward of ``module``, whose projections are parallel, a region: its hidden states are a RegionInput.

    It runs in ``random_numbers``. With ``sequences`` the hidden states that it is given are sequence shards.
    """
    name = first_parameter_name(module)
    who = type(module).__name__
    parameters = list(inspect.signature(module.forward).parameters)

    def enter(x: torch.Tensor, keywords: Keywords) -> RegionInput:
        if sequences is None:
            return RegionInput.of(x, axis, None)
        check_sequences(x, who)
        return RegionInput.of(x, axis, sequences.of(x, keywords))

    def region(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        given = _argument(name, args, kwargs)
        entered = enter(given, kwargs)
        # The hidden states may be keys and values, too (CTRL); a residual is added behind the region (BLOOM). This is
        # no function of one argument, which would be called for all arguments in every block.
        known = list(args)
        for index, x in enumerate(args):
            is_one = x is given or (isinstance(x, torch.Tensor) and x.shape == given.shape and _were_one(x, given))
            if is_one and parameters[index : index + 1] != [RESIDUAL]:
                known[index] = entered
        for key, x in kwargs.items():
            is_one = x is given or (isinstance(x, torch.Tensor) and x.shape == given.shape and _were_one(x, given))
            if is_one and key != RESIDUAL:
                kwargs[key] = entered
        with random_numbers(), region_scope():
            return forward(*known, **kwargs)

    wrap_forward(module, region, Level.REGION)


def _were_one(x: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether ZeRO-3 has made ``x`` and ``given``, which have the same shape, from one tensor."""
    node, other = x.grad_fn, given.grad_fn
    if node is None or other is None:
        is_plain = x.dtype == given.dtype and not (x.requires_grad or given.requires_grad)
        return is_plain and x.data_ptr() == given.data_ptr()
    return node.name() == other.name() == BEFORE_BACKWARD_ENDS and node.next_functions == other.next_functions


def check_sequences(x: torch.Tensor, who: str) -> None:
    """Raise ValueError where ``x``, the hidden states of ``who`` or a shard of them, has no sequence dim."""
    if x.dim() != 3:
        raise ValueError(
            f"ds_npu.parallel.sequence_parallel: found hidden states {list(x.shape)} in {who}; it needs [batch, "
            "sequence, hidden], and this model flattens them. What to do: sequence_parallel false"
        )


def run_on_whole_sequences(
    module: nn.Module, sequences: SequenceParallel, random_numbers: RandomNumbers = nullcontext
) -> None:
    """Gather the sequence shards of the input of ``module``, run it on whole sequences on every rank, shard its output.

    The gradients of its weights are then whole on each rank. It runs in ``random_numbers``, the same on all ranks.
    """
    name = first_parameter_name(module)
    who = type(module).__name__

    def whole(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        given = _argument(name, args, kwargs)
        check_sequences(given, who)
        shards = sequences.of(given, kwargs)

        def collected(each: Any) -> Any:
            mine = isinstance(each, torch.Tensor) and each.shape == given.shape
            # Modules may view their input, which is not contiguous once its padding is cut off.
            return shards.collect(each).contiguous() if mine else each

        args, kwargs = tree_map(collected, (args, kwargs))
        with random_numbers():
            out = forward(*args, **kwargs)
        first = _hidden_states(out)
        samples = given.shape[0]
        if first.dim() != 3 or first.shape[:2] != (samples, shards.length):
            raise ValueError(
                f"ds_npu.parallel.sequence_parallel: {who} (replicated) returns {list(first.shape)} for "
                f"{samples} sequences of {shards.length} tokens, which is not known how to shard. What to do: "
                "sequence_parallel false"
            )
        return _with_hidden_states(out, shards.shard(first))

    wrap_forward(module, whole, Level.REGION)


def run_on_sequence_shards(
    blocks: list[nn.Module],
    sequences: SequenceParallel,
    random_numbers: RandomNumbers = nullcontext,
    arrive_sharded: bool = False,
    leave_sharded: bool = False,
) -> None:
    """Shard the hidden states that enter the first of ``blocks``, gather those that leave the last.

    Between pipeline stages they travel as shards: ``arrive_sharded`` from the stage before, ``leave_sharded`` to the
    next one. The blocks run in ``random_numbers``. The hidden states between them carry their MicroBatch.
    """

    def in_block(forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        with random_numbers(), region_scope():
            return forward(*args, **kwargs)

    def first(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        given = _argument(names[0], args, kwargs)
        length = whole_length(given, kwargs) if arrive_sharded else given.shape[SEQUENCE_DIM]
        with sequences.new_forward(length) as (micro_batch, shards):
            if leave_sharded:
                LEAVING_LENGTH.set(micro_batch, length)
            x = given if arrive_sharded else shards.shard(given)
            micro_batch.carry_by(x)
            args, kwargs = replace_first_argument(names[0], lambda _: x, args, kwargs)
            out = forward(*args, **kwargs)
            micro_batch.carry_by(_hidden_states(out))
            return out

    def later(name: str, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        given = _argument(name, args, kwargs)
        with within(carried_by(given) or running()) as micro_batch:
            micro_batch.carry_by(given)
            sequences.find(micro_batch, given.shape[SEQUENCE_DIM], kwargs)
            out = forward(*args, **kwargs)
            micro_batch.carry_by(_hidden_states(out))
            return out

    def last(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        x = _hidden_states(out)
        return _with_hidden_states(out, sequences.find(carried_by(x), x.shape[SEQUENCE_DIM]).collect(x))

    names = [first_parameter_name(each) for each in blocks]
    for name, each in zip(names, blocks, strict=True):
        _shard_inputs_of_tokens(each, sequences)
        wrap_forward(each, in_block, Level.REGION)
        wrap_forward(each, first if each is blocks[0] else partial(later, name), Level.REGION)
    if not leave_sharded:
        wrap_forward(blocks[-1], last, Level.REGION)


def _shard_inputs_of_tokens(block: nn.Module, sequences: SequenceParallel) -> None:
    """Shard the argument OF_EACH_TOKEN of ``block`` as its hidden states are sharded."""
    parameters = list(inspect.signature(block.forward).parameters)
    if OF_EACH_TOKEN not in parameters:
        return

    def sharded(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        shards = sequences.of(_argument(parameters[0], args, kwargs), kwargs)

        def mine(parameter: str, x: Any) -> Any:
            return shards.shard(x) if parameter == OF_EACH_TOKEN and x is not None else x

        known = tuple(mine(*each) for each in zip(parameters, args, strict=False))
        return forward(*known, *args[len(known) :], **{key: mine(key, x) for key, x in kwargs.items()})

    wrap_forward(block, sharded, Level.REGION)


def begin_micro_batches(module: nn.Module) -> None:
    """Give each forward of ``module``, which holds blocks, a MicroBatch of its own."""

    def begin(forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        with new_forward():
            return forward(*args, **kwargs)

    wrap_forward(module, begin, Level.REGION)


def _argument(name: str, args: Arguments, kwargs: Keywords) -> Any:
    """The first argument, given by position or by ``name``."""
    return args[0] if args else kwargs[name]


def _hidden_states(out: Any) -> torch.Tensor:
    """The hidden states in the result ``out`` of a block: all of it, or its first item."""
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return found


def _with_hidden_states(out: Any, x: torch.Tensor) -> Any:
    """The result ``out`` of a block with the hidden states ``x`` instead."""
    return (x, *out[1:]) if isinstance(out, tuple) else x
