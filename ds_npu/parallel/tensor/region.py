"""Tensor-parallel regions: where each tensor rank computes its own heads, or its own columns of an MLP.

A region begins where hidden states enter column linears and ends in a row linear (Megatron-LM, arXiv:1909.08053).
Outside of regions hidden states are the same on every tensor rank, or, with Megatron sequence parallelism
(arXiv:2205.05198), shards [B, S / tp, H] of the sequence.

A user's module knows nothing of this: it reads the shape of its hidden states, and passes them to its projections. So
it is given a RegionInput, which has the shape of the whole hidden states, and from which column linears together take
one collective. Any other use of it uses hidden states that have entered the region.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from ds_npu.comm.crossing import collect, copy, gather, shard
from ds_npu.parallel.forward_wraps import Forward, first_parameter_name, replace_first_argument, wrap_forward
from ds_npu.parallel.tensor.axis import SEQUENCE_DIM, TensorAxis
from ds_npu.parallel.tensor.shard_access import Arguments, Keywords, Operation, region_scope
from ds_npu.parallel.tensor.tensor_attribute import tensor_property

SHAPE_ONLY: set[Operation] = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.ndimension,
    torch.Tensor.is_floating_point,
    torch.Tensor.__len__,
    *(tensor_property(name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")),
}
"""Operations on a RegionInput for which it need not enter the region."""


class SequenceShards:
    """The shards of the sequences of one model (Megatron sequence parallelism), and the length of these sequences.

    Sequences that tp does not divide are padded with zeros; the padding never enters a region.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self.axis = axis
        self.batch = self.length = 0

    def shard(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """This rank's [B, ceil(S / tp), H] of hidden states that are the same on every rank."""
        self.batch, self.length = x_BSH.shape[:2]
        return shard(padded(x_BSH, self.axis.size), SEQUENCE_DIM, self.axis.group)

    def set_lengths(self, x_BsH: torch.Tensor, keywords: Mapping[str, Any]) -> None:
        """Set batch and length from the arguments of a region: ``position_ids`` or ``position_embeddings``.

        A region that is recomputed may be of an earlier forward, whose sequences had another length. Without these
        arguments the length is that of the latest forward; raises ValueError where it cannot be.
        """
        self.batch = x_BsH.shape[0]
        if keywords.get("position_ids") is not None:
            self.length = keywords["position_ids"].shape[-1]
        elif keywords.get("position_embeddings") is not None:
            self.length = keywords["position_embeddings"][0].shape[-2]
        if -(-self.length // self.axis.size) != x_BsH.shape[SEQUENCE_DIM]:
            raise ValueError(
                f"a sequence shard of {x_BsH.shape[SEQUENCE_DIM]} tokens is recomputed, but the latest forward was of "
                f"{self.length} tokens over {self.axis.size} tensor ranks: call backward before the next forward, or "
                "give the region its position_ids by name"
            )

    def collect(self, x_BsH: torch.Tensor) -> torch.Tensor:
        """[B, S, H], the same on every rank."""
        return self.unpad(collect(x_BsH, SEQUENCE_DIM, self.axis.group))

    def unpad(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """``x`` without the padding of its sequence: a view."""
        return x_BSH if x_BSH.shape[SEQUENCE_DIM] == self.length else x_BSH[:, : self.length]


def padded(x_BSH: torch.Tensor, multiple: int) -> torch.Tensor:
    """``x`` with zeros behind its sequence, up to a length that ``multiple`` divides."""
    missing = -x_BSH.shape[SEQUENCE_DIM] % multiple
    return functional.pad(x_BSH, (0, 0, 0, missing)) if missing else x_BSH


class RegionInput(torch.Tensor):
    """Hidden states that are about to enter a region: their shape reads as [B, S, H], also where they are a shard."""

    source: torch.Tensor
    """Hidden states outside of the region: [B, S, H], or a shard of it."""
    axis: TensorAxis
    shards: SequenceShards | None
    _entered: torch.Tensor | None

    @staticmethod
    def of(source: torch.Tensor, axis: TensorAxis, shards: SequenceShards | None) -> RegionInput:
        """The input of a region; with ``shards``, ``source`` is a sequence shard."""
        shape = list(source.shape)
        if shards is not None:
            shape[SEQUENCE_DIM] = shards.length
        # One element, expanded to the whole shape: no memory, and no values to read.
        made = source.new_empty(()).expand(shape).as_subclass(RegionInput)
        made.source, made.axis, made.shards, made._entered = source, axis, shards, None
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


def join_hidden_states(model: nn.Module, blocks: int, shards: SequenceShards) -> None:
    """Gather the sequence shards in the output of ``model``: ``hidden_states``, those between its blocks."""

    def joined(states: Any) -> Any:
        # Those before the first block and after the last are whole already.
        if type(states) is tuple and len(states) == blocks + 1 and all(map(_is_hidden_states, states)):
            first, *between, last = states
            return (first, *(None if each is None else shards.collect(each) for each in between), last)
        return states

    def whole(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if isinstance(out, dict) and "hidden_states" in out:
            out["hidden_states"] = joined(out["hidden_states"])
        return tuple(map(joined, out)) if type(out) is tuple else out

    wrap_forward(model, whole)


def _is_hidden_states(value: Any) -> bool:
    return value is None or (isinstance(value, torch.Tensor) and value.dim() == 3)


RandomNumbers = Callable[[], AbstractContextManager[None]]
"""Makes a context in which a module draws the random numbers that it is to have (``RegionRandomness``)."""


def make_region(
    module: nn.Module, axis: TensorAxis, shards: SequenceShards | None, random_numbers: RandomNumbers = nullcontext
) -> None:
    """Make the forward of ``module``, whose projections are parallel, a region: its hidden states are a RegionInput.

    It runs in ``random_numbers``.
    """
    name = first_parameter_name(module)

    def enter(x: torch.Tensor, keywords: Keywords) -> RegionInput:
        if shards is not None:
            check_sequences(x, type(module).__name__)
            shards.set_lengths(x, keywords)
        return RegionInput.of(x, axis, shards)

    def region(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = replace_first_argument(name, lambda x: enter(x, kwargs), args, kwargs)
        with random_numbers(), region_scope():
            return forward(*args, **kwargs)

    wrap_forward(module, region)


def check_sequences(x: torch.Tensor, who: str) -> None:
    """Raise ValueError where ``x``, the hidden states of ``who`` or a shard of them, has no sequence dim."""
    if x.dim() != 3:
        raise ValueError(
            f"ds_npu.parallel.sequence_parallel: found hidden states {list(x.shape)} in {who}; it needs [batch, "
            "sequence, hidden], and this model flattens them. What to do: sequence_parallel false"
        )


def run_on_whole_sequences(
    module: nn.Module, shards: SequenceShards, random_numbers: RandomNumbers = nullcontext
) -> None:
    """Gather the sequence shards that ``module`` is given, run it on whole sequences on every rank, shard its output.

    The gradients of its weights are then whole on each rank. It runs in ``random_numbers``, which the ranks share.
    """
    name, who = first_parameter_name(module), type(module).__name__

    def whole(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs[name]
        check_sequences(given, who)
        shards.set_lengths(given, kwargs)

        def collected(each: Any) -> Any:
            mine = isinstance(each, torch.Tensor) and each.shape == given.shape
            # Modules take views of their input; without padding it is not contiguous.
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

    wrap_forward(module, whole)


def run_on_sequence_shards(
    blocks: list[nn.Module], shards: SequenceShards, random_numbers: RandomNumbers = nullcontext
) -> None:
    """Shard the hidden states that the first of ``blocks`` is given, gather those that the last returns.

    The blocks run in ``random_numbers``.
    """

    def block(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        with random_numbers(), region_scope():
            return forward(*args, **kwargs)

    def first(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = replace_first_argument(name, shards.shard, args, kwargs)
        return forward(*args, **kwargs)

    def last(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        return (shards.collect(out[0]), *out[1:]) if isinstance(out, tuple) else shards.collect(out)

    for each in blocks:
        wrap_forward(each, block)
    name = first_parameter_name(blocks[0])
    wrap_forward(blocks[0], first)
    wrap_forward(blocks[-1], last)
