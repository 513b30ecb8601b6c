"""A tiny model of one's own that calls its checkpoints itself, and ways to do so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import deepspeed
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 14), nn.GELU(), nn.Linear(14, 8))
        self.recompute: Callable[..., torch.Tensor] | None = None

    def sublayer(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.sublayer(x) if self.recompute is None else self.recompute(self.sublayer, x))


def in_turn(blocks: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def each_block(recompute: Callable[..., torch.Tensor], blocks: Sequence[Block], x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = recompute(block, x)
    return x


def deepspeeds(block: Block, x: torch.Tensor) -> torch.Tensor:
    return deepspeed.checkpointing.checkpoint(block, x)


REENTRANT, OTHER = partial(checkpoint, use_reentrant=True), partial(checkpoint, use_reentrant=False)
OWN_WAYS = {
    "none": in_turn,
    "reentrant": partial(each_block, REENTRANT),
    "other": partial(each_block, OTHER),
    "by name": partial(each_block, lambda block, x: OTHER(block, x=x)),
    "DeepSpeed's": partial(each_block, deepspeeds),
    "two blocks": lambda blocks, x: REENTRANT(lambda x: in_turn(blocks[1:], x), blocks[0](x)),
    "two other blocks": lambda blocks, x: OTHER(lambda x: in_turn(blocks[1:], x), blocks[0](x)),
    "all blocks": lambda blocks, x: OTHER(lambda x: in_turn(blocks, x), x),
}
"""How a model of one's own checkpoints its blocks."""
GLOBS = {
    "embed": "embedding",
    "blocks.*": "block",
    "**.norm": "norm",
    "blocks.*.mlp": "mlp",
    "blocks.*.mlp.0": "up",
    "blocks.*.mlp.2": "down",
    "head": "head",
}


class Own(nn.Module):
    """A model that calls its checkpoints itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(8)
        self.way: Callable[..., torch.Tensor] = in_turn
        self.double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.head(self.norm(self.way(list(self.blocks), self.embed(input_ids))))
        return SimpleNamespace(loss=functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
