"""The whole of a weight that is sharded over the tensor ranks, for code outside of its own layer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from ds_npu.comm.collectives import all_gather
from ds_npu.ops.autograd import Context, applied
from ds_npu.parallel.runtime.arrival import arrive
from ds_npu.parallel.runtime.calls import Arguments, Keywords, Operation
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute, tensor_property
from ds_npu.parallel.tensor.shard_access import (
    ShardAccessError,
    ShardedParameter,
    WeightShard,
    is_internal,
    local_shard,
    ranks_agree,
    refusal,
)
from ds_npu.parallel.tensor.sharding import Sharding


def whole_weight(parameter: nn.Parameter) -> torch.Tensor:
    """Gather the weight of which ``parameter`` is this rank's shard; every tensor rank calls this at the same time.

    Use it for a computation that is the same on every tensor rank: then its gradient is the same too, and each rank
    takes its shard of that. A parameter that is not sharded is returned as it is. Raises ValueError where ZeRO-3 has
    partitioned it.
    """
    if not isinstance(parameter, ShardedParameter):
        return parameter
    shard = parameter.shard
    return from_shard(parameter, partial(_gather, shard=shard), shard.sharding, shard.group)


def gather_shards(mine: torch.Tensor, sharding: Sharding, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The whole tensor, from each rank's shard ``mine`` by ``sharding``: one all-gather, without gradients."""
    lengths = [sharding.length(rank) for rank in range(len(sharding.ranges))]
    # Shards differ by a head or a column; the shorter are padded, since not every backend gathers uneven ones.
    padding = [0, 0] * (mine.dim() - 1 - sharding.dim % mine.dim())
    padded = functional.pad(mine, (*padding, 0, max(lengths) - mine.shape[sharding.dim]))
    parts = all_gather(padded.unsqueeze(0), 0, group).wait()
    return sharding.assemble(
        [part.narrow(sharding.dim, 0, length) for part, length in zip(parts, lengths, strict=True)]
    )


def _gather(parameter: torch.Tensor, shard: WeightShard) -> torch.Tensor:
    mine = local_shard(parameter)
    if mine.dim() != len(shard.shape):
        raise ValueError(
            f"{shard.name}: ZeRO-3 holds it in pieces. What to do: gather this rank's shard first, in "
            "deepspeed.zero.GatheredParameters([parameter])"
        )
    return gather_shards(mine, shard.sharding, shard.group)


class _ShardContext(Context):
    sharding: Sharding
    rank: int


class _FromShard(torch.autograd.Function):
    """The whole tensor that ``make`` makes from this rank's shard.

    Every rank gets its whole gradient, and takes its own shard of that.
    """

    @staticmethod
    def forward(
        ctx: _ShardContext,
        mine: torch.Tensor,
        make: Callable[[torch.Tensor], torch.Tensor],
        sharding: Sharding,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.sharding, ctx.rank = sharding, dist.get_rank(group)
        return make(mine)

    @staticmethod
    def backward(ctx: _ShardContext, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.sharding.take(gradients[0], ctx.rank), None, None, None


from_shard = applied(_FromShard, _FromShard.forward)


class WholeWeight(torch.Tensor):
    """The whole of a sharded weight, gathered at the first computation with it; its metadata costs no message.

    Every tensor rank has to compute with it at the same time: in a forward of the model (or a backward), outside of its
    regions. Elsewhere a computation raises ShardAccessError.
    """

    parameter: torch.Tensor
    shard: WeightShard
    _whole: torch.Tensor | None

    @staticmethod
    def of(parameter: torch.Tensor, shard: WeightShard) -> WholeWeight:
        make: Callable[..., WholeWeight] = torch.Tensor._make_wrapper_subclass
        made = make(WholeWeight, shard.shape, dtype=parameter.dtype, device=parameter.device)
        made.parameter = parameter
        made.shard = shard
        made._whole = None
        return made

    def gathered(self, what: str) -> torch.Tensor:
        """The values, for a read of ``what``. Raises ShardAccessError, with the reader, unless ``ranks_agree``."""
        if self._whole is None:
            if not ranks_agree():
                raise refusal(self.shard, what)
            self._whole = _gather(self.parameter, self.shard)
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
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
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch._ops.OpOverload, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        def whole(value: Any) -> Any:
            return value.gathered(f"its {func.__name__.partition('.')[0]}") if isinstance(value, cls) else value

        if func._schema.is_mutable and args and isinstance(args[0], cls):
            raise _not_written(args[0])
        gathered_args, gathered_kwargs = tree_map(whole, (args, kwargs or {}))
        return func(*gathered_args, **gathered_kwargs)


def _not_written(whole: WholeWeight) -> ShardAccessError:
    return ShardAccessError(
        f"{whole.shard.name} is sharded over {len(whole.shard.sharding.ranges)} tensor ranks, and what its module "
        "shows is a gathered copy: writing to it would change nothing. What to do: change the weight before "
        "deepspeed.initialize, or write to the shard, local_shard(parameter) of ds_npu.parallel.tensor.shard_access"
    )


_SET_DATA = tensor_property("data").__set__
_REQUIRES_GRAD, _GRAD = tensor_property("requires_grad"), tensor_property("grad")
_OF_PARAMETER: set[Operation] = {
    *(_REQUIRES_GRAD.__get__, _REQUIRES_GRAD.__set__, torch.Tensor.requires_grad_),
    *(_GRAD.__get__, _GRAD.__set__),
}
"""Operations that go to the parameter itself."""
_OF_VALUES: set[Operation] = {
    *(torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.numpy, torch.Tensor.tolist),
    *(torch.Tensor.__reduce_ex__, torch.Tensor.__deepcopy__, torch.Tensor.__array__),
}
"""Operations that read the values without an operator."""


_DS_ID = TensorAttribute[int]("ds_id")
"""DeepSpeed's number of a parameter that ZeRO-3 partitions."""


class ShowsWhole(nn.Module):
    """A layer that shows sharded weights as WholeWeights to code that may not compute with shards."""

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        # Awaited weights have a class below; isinstance would be a Python call at each read.
        if not issubclass(type(value), ShardedParameter) or is_internal():
            return value
        arrive(value)
        # get_parameter() must return a parameter, and ZeRO-3 needs its own one; a ShardedParameter guards itself.
        if sys._getframe(1).f_code is nn.Module.get_parameter.__code__ or _DS_ID.is_on(value):
            return value
        shard = value.shard
        return from_shard(value, partial(WholeWeight.of, shard=shard), shard.sharding, shard.group)
