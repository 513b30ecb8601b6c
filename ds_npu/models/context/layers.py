"""What layers other than attention need of the whole sequence: the batch in every block, rotary angles, routers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ds_npu.models.context.batch import Running, SplitMask
from ds_npu.parallel.tensor.region import around

BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on how long the sequence is."""


def remember_batch(block: nn.Module, running: Running) -> None:
    """Let ``block`` run with the batch of its mask, also where it is computed again in backward."""

    def remembering(forward: Any, *args: Any, **kwargs: Any) -> Any:
        mask = next((each for each in (*args, *kwargs.values()) if isinstance(each, SplitMask)), None)
        if mask is None:
            return forward(*args, **kwargs)
        with running.of(mask.batch):
            return forward(*args, **kwargs)

    around(block, remembering)


def depends_on_length(rotary: nn.Module) -> bool:
    """Whether the angles that ``rotary`` makes depend on the largest position that it is shown."""
    kinds = vars(rotary).get("rope_type")
    names = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(name, str) and any(kind in name for kind in BY_LENGTH) for name in names)


def show_last_position(rotary: nn.Module, running: Running) -> None:
    """Let ``rotary``, called with (x, position_ids), see the largest position of all ranks behind this rank's."""

    def turned(forward: Any, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        batch = running.split
        if batch is None:
            return forward(x, position_ids, *args, **kwargs)
        last = batch.last_position.expand(*position_ids.shape[:-1], 1)
        angles = forward(x, torch.cat([position_ids, last], -1), *args, **kwargs)
        return tree_map(lambda each: each[..., :-1, :], angles)

    around(rotary, turned)


def show_tokens_of_all_ranks(router: nn.Module, running: Running) -> None:
    """Let ``router``, which returns (logits, ...), return the logits of all tokens, if the loss is made of them.

    The block ignores them; the auxiliary loss of load balancing is a product of two means over all tokens.
    """

    def routed(forward: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        batch = running.split
        if batch is None or not batch.joins_routers:
            return out
        logits_TE, *rest = out
        return (batch.join(logits_TE.view(batch.samples, -1, logits_TE.shape[-1])).flatten(0, 1), *rest)

    around(router, routed)
