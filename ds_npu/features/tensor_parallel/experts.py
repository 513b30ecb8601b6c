"""Mixture-of-experts blocks over the tensor ranks: each has a part of the columns of every expert.

The router stays outside of the region: every rank routes all tokens alike (its own shard of them, with sequence
parallelism). Only what the experts take in, tokens and their routing weights, enters it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ds_npu.comm.collectives import all_gather
from ds_npu.comm.crossing import copy, gather, reduce, scatter_sum
from ds_npu.parallel.forward_wraps import wrap_forward
from ds_npu.parallel.tensor.axis import TensorAxis
from ds_npu.parallel.tensor.region import SequenceShards
from ds_npu.parallel.tensor.shard_access import allow_shard_access
from ds_npu.parallel.tensor.sharding import Sharding, keep_shard

TOKEN_DIM = 0


def shard_experts(module: nn.Module, gate_up: Sharding, down: Sharding, axis: TensorAxis) -> None:
    """Shard ``gate_up_proj`` [E, 2 I, H] and ``down_proj`` [E, H, I] of ``module`` along I.

    Its forward takes tokens [T, H], the experts [T, k] of each and their weights [T, k].
    """
    keep_shard(module.get_parameter("gate_up_proj"), gate_up, axis.rank)
    keep_shard(module.get_parameter("down_proj"), down, axis.rank)
    signature = inspect.signature(module.forward)

    def experts(forward: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            bound.arguments[name] = _enter(value, axis)
        with allow_shard_access():
            partial: torch.Tensor = forward(*bound.args, **bound.kwargs)
        if axis.sequence_parallel:
            return scatter_sum(partial, TOKEN_DIM, axis.group)
        return reduce(partial, axis.group)

    wrap_forward(module, experts)


def _enter(tokens: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """Tokens of all ranks, rank by rank; the experts do not mind the order, and what leaves them has the same."""
    if not axis.sequence_parallel:
        return copy(tokens, axis.group) if tokens.is_floating_point() else tokens
    if tokens.is_floating_point():
        return gather(tokens, TOKEN_DIM, axis.group)
    return all_gather(tokens, TOKEN_DIM, axis.group).wait()


def show_all_tokens(router: nn.Module, shards: SequenceShards) -> None:
    """Let ``router``, which returns (logits, weights, experts), return the logits of the tokens of all ranks.

    The block ignores them; the auxiliary loss of load balancing, which is made of them, is a mean over all tokens.
    """

    def routed(forward: Any, *args: Any, **kwargs: Any) -> Any:
        logits_TE, *rest = forward(*args, **kwargs)
        all_BSE = shards.collect(logits_TE.view(shards.batch, -1, logits_TE.shape[-1]))
        return (all_BSE.flatten(0, 1), *rest)

    wrap_forward(router, routed)
