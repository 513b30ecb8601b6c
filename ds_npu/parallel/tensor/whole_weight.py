"""The whole of a weight that is split over the tensor ranks, for whoever computes with it outside of its own layer."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from ds_npu.comm.collectives import all_gather
from ds_npu.parallel.tensor.shard_access import (
    ShardAccessError,
    ShardedParameter,
    WeightShard,
    is_internal,
    local_shard,
    ranks_agree,
    refusal,
)


def whole_weight(parameter: nn.Parameter) -> torch.Tensor:
    """Gather the weight of which ``parameter`` is this rank's shard; every tensor rank calls this at the same time.

    The result is for a computation that is the same on every tensor rank; its gradient is, too, and each rank takes its
    part of it. A parameter that is not split is returned as it is. Raises ValueError where ZeRO-3 holds it in pieces.
    """
    if not isinstance(parameter, ShardedParameter):
        return parameter
    function: Any = _Gather
    whole: torch.Tensor = function.apply(parameter, parameter.shard)
    return whole


def gathered(mine: torch.Tensor, shard: WeightShard) -> torch.Tensor:
    """The whole weight, from each tensor rank's shard ``mine``: one all-gather, without gradients."""
    sharding = shard.sharding
    if mine.dim() != len(shard.shape):
        raise ValueError(
            f"{shard.name}: ZeRO-3 holds it in pieces. What to do: gather this rank's shard first, in "
            "deepspeed.zero.GatheredParameters([parameter])"
        )
    lengths = [sharding.length(rank) for rank in range(len(sharding.ranges))]
    first = mine.movedim(sharding.dim, 0)
    # Shards differ by a head or a column; the shorter are padded, since not every backend gathers uneven ones.
    padding = [0, 0] * (first.dim() - 1) + [0, max(lengths) - first.shape[0]]
    parts = all_gather(functional.pad(first, padding)[None].contiguous(), 0, shard.group).wait()
    return sharding.assemble(
        [part[:length].movedim(0, sharding.dim) for part, length in zip(parts, lengths, strict=True)]
    )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, shard: WeightShard) -> torch.Tensor:
        ctx.shard = shard
        return gathered(local_shard(parameter), shard)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _part(ctx.shard, gradients[0]), None


class _Show(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, shard: WeightShard) -> torch.Tensor:
        ctx.shard = shard
        return WholeWeight.of(parameter, shard)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _part(ctx.shard, gradients[0]), None


def _part(shard: WeightShard, gradient: torch.Tensor) -> torch.Tensor:
    return shard.sharding.take(gradient, dist.get_rank(shard.group))


class WholeWeight(torch.Tensor):
    """The whole of a sharded weight, gathered when it is first computed with: its metadata costs no message.

    Every tensor rank has to compute with it at the same time. So it can be computed with inside of a forward of the
    model (or a backward), outside of its regions; elsewhere that raises ShardAccessError.
    """

    parameter: Any
    shard: WeightShard
    _whole: torch.Tensor | None

    @staticmethod
    def of(parameter: torch.Tensor, shard: WeightShard) -> WholeWeight:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: WholeWeight = make(WholeWeight, shard.shape, dtype=parameter.dtype, device=parameter.device)
        made.parameter, made.shard, made._whole = parameter, shard, None
        return made

    def gathered(self, what: str) -> torch.Tensor:
        """Raises ShardAccessError, which names the reader, where tensor ranks may not all be here."""
        if self._whole is None:
            if not ranks_agree():
                raise refusal(self.shard, what)
            self._whole = gathered(local_shard(self.parameter), self.shard)
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = args[0] if args and isinstance(args[0], cls) else None
        with torch._C.DisableTorchFunctionSubclass():
            if own is not None and func in _OF_PARAMETER:
                return func(own.parameter, *args[1:], **(kwargs or {}))
            if own is not None and func in _OF_VALUES:
                return func(own.gathered(f"its {func.__name__}").detach(), *args[1:], **(kwargs or {}))
            if own is not None and func == _SET_DATA:
                raise _not_written(own)
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def whole(value: Any) -> Any:
            return value.gathered(f"its {func.__name__.partition('.')[0]}") if isinstance(value, cls) else value

        if func._schema.is_mutable and args and isinstance(args[0], cls):
            raise _not_written(args[0])
        gathered_args, gathered_kwargs = tree_map(whole, (args, kwargs or {}))
        return func(*gathered_args, **gathered_kwargs)


def _not_written(whole: WholeWeight) -> ShardAccessError:
    return ShardAccessError(
        f"{whole.shard.name} is split over {len(whole.shard.sharding.ranges)} tensor ranks, and what its module shows "
        "is a gathered copy: writing to it would change nothing. What to do: change the weight before "
        "deepspeed.initialize, or write to the shard, local_shard(parameter) of ds_npu.parallel.tensor.shard_access"
    )


_GETSET: Any = torch._C.TensorBase
_SET_DATA = _GETSET.data.__set__
_OF_PARAMETER = {
    *(_GETSET.requires_grad.__get__, _GETSET.requires_grad.__set__, torch.Tensor.requires_grad_),
    *(_GETSET.grad.__get__, _GETSET.grad.__set__),
}
"""What is asked of, or said to, the parameter itself."""
_OF_VALUES = {
    *(torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.numpy, torch.Tensor.tolist),
    *(torch.Tensor.__reduce_ex__, torch.Tensor.__deepcopy__, torch.Tensor.__array__),
}
"""What is made of the values without an operator."""


class ShowsWhole(nn.Module):
    """A layer whose sharded weights are seen whole by others that read them as its attributes."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if type(value) is not ShardedParameter or is_internal():
            return value
        # get_parameter() has to return a parameter, and ZeRO-3 gathers what it knows; both are protected as they are.
        if sys._getframe(1).f_code is nn.Module.get_parameter.__code__ or "ds_id" in vars(value):
            return value
        function: Any = _Show
        return function.apply(value, value.shard)
