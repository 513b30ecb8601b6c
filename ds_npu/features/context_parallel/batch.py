"""One batch over the context ranks: which tokens are this rank's, and how what ranks make of theirs is joined.

What goes in and what comes out is the same on every context rank. The gradients of what comes out are, too; those of
weights, and of what goes in, belong to this rank's tokens, and add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional

from ds_npu.comm.crossing import collect
from ds_npu.features.context_parallel.visibility import Visibility
from ds_npu.ops.attention import Mask
from ds_npu.parallel.context.axis import ContextAxis
from ds_npu.parallel.context.load_balance import Tokens, copy_to_device

SEQUENCE_DIM = 1
"""Of what comes in and goes out, [B, S, ...]."""


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of ``samples`` sequences, as this rank's layers need it."""

    samples: int
    tokens: Tokens
    axis: ContextAxis
    device: torch.device
    visibility: Visibility
    last_position: torch.Tensor
    """The largest of all positions."""
    joins_routers: bool = False
    """Whether the loss has an auxiliary part that is made of the routers' logits of all tokens."""

    @property
    def count(self) -> int:
        """Tokens of each sample that this rank has."""
        return self.tokens.count(self.axis.rank)

    @property
    def group(self) -> Any:
        return self.axis.topology.group("cp")

    @cached_property
    def index(self) -> torch.Tensor:
        """Where in their sequence this rank's tokens are: int64 [B, tokens], [1, tokens] where samples are alike."""
        return copy_to_device(self.tokens.index(self.axis.rank), self.device)

    @cached_property
    def places(self) -> torch.Tensor:
        """Where the tokens of each sequence are among those of all ranks, each rank's padded to the longest."""
        longest = self.longest
        found = torch.empty(self.tokens.samples, self.tokens.length, dtype=torch.int64)
        for rank in range(self.axis.size):
            index = self.tokens.index(rank)
            found.scatter_(1, index, torch.arange(index.shape[1]).expand_as(index) + rank * longest)
        return copy_to_device(found, self.device)

    @property
    def longest(self) -> int:
        """The most tokens of a sample that a rank has."""
        return max(self.tokens.count(rank) for rank in range(self.axis.size))

    def take(self, x: torch.Tensor, dim: int = SEQUENCE_DIM) -> torch.Tensor:
        """This rank's tokens of ``x``, in which ``dim`` is the sequence and the dim before it the samples (or 1)."""
        return _taken(x, dim, self.index)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, ...] in natural order, the same on every rank, from each one's [B, its tokens, ...].

        Its gradient is the same on every rank, too, and each takes its own part of it.
        """
        missing = self.longest - x.shape[SEQUENCE_DIM]
        padded = functional.pad(x, (*(0, 0) * (x.dim() - SEQUENCE_DIM - 1), 0, missing)) if missing else x
        return _taken(collect(padded, SEQUENCE_DIM, self.group), SEQUENCE_DIM, self.places)


def _taken(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    if len(index) == 1:
        return x.index_select(dim, index[0])
    shape = [1] * (dim - 1) + list(index.shape) + [1] * (x.dim() - dim - 1)
    return x.take_along_dim(index.view(shape), dim)


@dataclass(frozen=True, eq=False)
class SplitMask:
    """What a layer is given as its mask: what its rows see, and the batch it is of.

    A layer that is computed again in backward has them from here, whatever batch came since.
    """

    mask: Mask
    batch: Batch


class WholeBatch:
    """In place of a Batch: every rank computes all tokens, as it would without context ranks."""


class Running:
    """Which batch the forward that is running is of."""

    def __init__(self) -> None:
        self.batch: Batch | WholeBatch | None = None

    @contextmanager
    def of(self, batch: Batch | WholeBatch) -> Iterator[None]:
        """Within it, ``batch`` is the one."""
        before, self.batch = self.batch, batch
        try:
            yield
        finally:
            self.batch = before

    @property
    def split(self) -> Batch | None:
        """The batch that is running, if it is split."""
        return self.batch if isinstance(self.batch, Batch) else None

    def expected(self, who: str) -> Batch | WholeBatch:
        """The batch that is running; raises RuntimeError where ``who`` is computed outside of a forward."""
        if self.batch is None:
            raise RuntimeError(
                f"{who} is computed outside of the forward of the model that ds_npu.parallel.context has spread over "
                "its ranks, so it is not known which tokens it has: call the whole model, as engine(...)"
            )
        return self.batch
