"""Layers other than attention that need the whole sequence: length-dependent rotary angles, and router logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ds_npu.features.context_parallel.sharded_batch import RunningBatch, ShardedBatch
from ds_npu.models.attributes import attribute
from ds_npu.parallel.runtime.forward_wraps import Level, wrap_forward

P = ParamSpec("P")
T = TypeVar("T")

BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose angles depend on the length of the sequence."""
ROUTER_LOGITS = "router_logits"


def depends_on_length(rotary: nn.Module) -> bool:
    """Whether the angles that ``rotary`` computes depend on the largest of its position_ids."""
    kind, kinds = attribute(rotary, "rope_type", str), attribute(rotary, "rope_type", dict)
    names = (kinds or {}).values() if kind is None else [kind]
    return any(isinstance(name, str) and any(kind in name for kind in BY_LENGTH) for name in names)


def show_last_position(rotary: nn.Module, running_batch: RunningBatch) -> None:
    """Append the batch's largest position to the position_ids of ``rotary``, and drop its angles from the result."""

    def turned(
        forward: Callable[..., Any], x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        batch = running_batch.require(f"a rotary embedding whose angles depend on the length, {type(rotary).__name__},")
        if not isinstance(batch, ShardedBatch):
            return forward(x, position_ids, *args, **kwargs)
        last = batch.last_position.expand(*position_ids.shape[:-1], 1)
        angles = forward(x, torch.cat([position_ids, last], -1), *args, **kwargs)
        return tree_map(lambda each: each[..., :-1, :], angles)

    wrap_forward(rotary, turned, Level.SEQUENCE)


def gather_router_logits(decoder: nn.Module, running_batch: RunningBatch) -> None:
    """Make ``decoder`` return the router logits of all tokens: the load-balancing loss multiplies two means of them.

    They are gathered outside of its blocks, which activation checkpointing recomputes.
    """

    def gathered(forward: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        out, batch = forward(*args, **kwargs), running_batch.sharded
        if batch is not None and isinstance(out, dict) and out.get(ROUTER_LOGITS) is not None:
            by_sample = (each.view(batch.samples, -1, each.shape[-1]) for each in out[ROUTER_LOGITS])
            out[ROUTER_LOGITS] = tuple(batch.gather(each).flatten(0, 1) for each in by_sample)
        return out

    wrap_forward(decoder, gathered, Level.SEQUENCE)
