"""What is made of the whole sequence beside attention: rotary angles that go with its length, the routers' logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ds_npu.features.context_parallel.batch import Batch, Running
from ds_npu.parallel.forward_wraps import wrap_forward

BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on how long the sequence is."""
ROUTER_LOGITS = "router_logits"


def depends_on_length(rotary: nn.Module) -> bool:
    """Whether the angles that ``rotary`` makes depend on the largest position that it is shown."""
    kinds = vars(rotary).get("rope_type")
    names = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(name, str) and any(kind in name for kind in BY_LENGTH) for name in names)


def show_last_position(rotary: nn.Module, running: Running) -> None:
    """Let ``rotary``, called with (x, position_ids), see the largest position of all ranks behind this rank's."""

    def turned(forward: Any, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        batch = running.expected(f"a rotary embedding whose angles depend on the length, {type(rotary).__name__},")
        if not isinstance(batch, Batch):
            return forward(x, position_ids, *args, **kwargs)
        last = batch.last_position.expand(*position_ids.shape[:-1], 1)
        angles = forward(x, torch.cat([position_ids, last], -1), *args, **kwargs)
        return tree_map(lambda each: each[..., :-1, :], angles)

    wrap_forward(rotary, turned)


def join_router_logits(decoder: nn.Module, running: Running) -> None:
    """Let ``decoder`` return its routers' logits of all tokens: the loss of load balancing is a product of two means.

    Outside of its blocks, which activation checkpointing computes again.
    """

    def joined(forward: Any, *args: Any, **kwargs: Any) -> Any:
        out, batch = forward(*args, **kwargs), running.split
        if batch is not None and isinstance(out, dict) and out.get(ROUTER_LOGITS) is not None:
            by_sample = (each.view(batch.samples, -1, each.shape[-1]) for each in out[ROUTER_LOGITS])
            out[ROUTER_LOGITS] = tuple(batch.join(each).flatten(0, 1) for each in by_sample)
        return out

    wrap_forward(decoder, joined)
