"""Mixture-of-experts layers over the tensor ranks: each rank holds a shard of the columns of every expert.

The router is outside of the region: every rank routes all tokens alike (with sequence parallelism, those of its
sequence shard). The inputs of the experts, tokens and their routing weights, enter the region.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from ds_npu.comm.collectives import all_gather
from ds_npu.comm.crossing import copy, gather, reduce, scatter_sum
from ds_npu.features.modules.expert_layout import ExpertLayout, Layout
from ds_npu.features.tensor_parallel.adapters import with_adapter
from ds_npu.models import kinds
from ds_npu.models.attributes import with_attributes
from ds_npu.parallel.runtime.forward_wraps import Level, P, wrap_forward
from ds_npu.parallel.runtime.micro_batch import running
from ds_npu.parallel.tensor.axis import TensorAxis
from ds_npu.parallel.tensor.sequence_shards import SequenceParallel
from ds_npu.parallel.tensor.shard_access import allow_shard_access
from ds_npu.parallel.tensor.sharding import Sharding

TOKENS_DIM = 0
"""The dim of tokens in flattened hidden states [T, H]."""
DOWN_BIAS = "down_proj_bias"


def layouts_to_shard(
    layouts: Mapping[str, Layout], experts: Mapping[str, nn.Module], size: int
) -> dict[str, ExpertLayout]:
    """The layouts of ``experts``, whose columns ``size`` ranks share; raises ValueError for what cannot be shared."""
    found = {}
    for name, module in experts.items():
        layout = layouts.get(name)
        why = "has an adapter" if with_adapter(name) != name else ""
        if not isinstance(layout, ExpertLayout):
            why = "holds its experts in a list"
        elif set(layout.names) != kinds.own_shapes(module).keys():
            why = f"has {', '.join(kinds.own_shapes(module))}, of which {', '.join(layout.names)} are known"
        if why or not isinstance(layout, ExpertLayout):
            raise ValueError(
                f"ds_npu.parallel.tensor: found {size}; {name} ({type(module).__name__}) {why}. What to do: "
                "ds_npu.parallel.expert or expert_tensor > 1 beside it, or the role replicated for it in ds_npu.plan"
            )
        found[name] = layout
    return found


def enter_experts(module: nn.Module, axis: TensorAxis, bias: Sharding | None = None) -> None:
    """Make the forward of experts, whose weights are sharded, a region: tokens enter it, their sum leaves it.

    ``module`` has shards of ``gate_up_proj`` [E, 2 I, H] and ``down_proj`` [E, H, I] along I. Its forward takes tokens
    [T, H], their experts [T, k] (int64) and their routing weights [T, k]. ``bias``: how that of ``down_proj`` [E, H] is
    sharded; each rank adds its part, and zeros elsewhere.
    """
    signature = inspect.signature(module.forward)

    def experts(forward: Callable[P, torch.Tensor], *args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            bound.arguments[name] = _enter(value, axis)
        with allow_shard_access(), _padded_bias(module, axis, bias):
            partial = forward(*bound.args, **bound.kwargs)
        return scatter_sum(partial, TOKENS_DIM, axis.group) if axis.sequence_parallel else reduce(partial, axis.group)

    wrap_forward(module, experts, Level.REGION)


@contextmanager
def _padded_bias(module: nn.Module, axis: TensorAxis, bias: Sharding | None) -> Iterator[None]:
    """A context in which ``module`` finds its shard of the bias between zeros, in place of the shard."""
    if bias is None:
        yield
        return
    ((start, stop),) = bias.ranges[axis.rank]
    padded = functional.pad(module.get_parameter(DOWN_BIAS), (start, bias.size - stop))
    with with_attributes(module, {DOWN_BIAS: padded}):
        yield


def _enter(tokens: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """All tokens inside of the region: gathered rank by rank from sequence shards, and scattered in the same order."""
    if not axis.sequence_parallel:
        return copy(tokens, axis.group) if tokens.is_floating_point() else tokens
    if tokens.is_floating_point():
        return gather(tokens, TOKENS_DIM, axis.group)
    return all_gather(tokens, TOKENS_DIM, axis.group).wait()


def show_all_tokens(router: nn.Module, sequences: SequenceParallel, index: int) -> None:
    """Make ``router``, whose output ``index`` are logits [T, E], return the logits of the tokens of all ranks.

    The layer ignores them; the auxiliary load-balancing loss takes means of them over all tokens.
    """

    def routed(
        forward: Callable[P, tuple[torch.Tensor, ...]], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[torch.Tensor, ...]:
        outputs = list(forward(*args, **kwargs))
        shards = sequences.find(running())
        logits_TE = outputs[index]
        outputs[index] = shards.collect(logits_TE.view(-1, shards.count, logits_TE.shape[-1])).flatten(0, 1)
        return tuple(outputs)

    wrap_forward(router, routed, Level.REGION)
