"""One batch sharded over the context ranks: which tokens are this rank's, and how results of all ranks are gathered.

A model's inputs and outputs are the same on every context rank, and so are the gradients of its outputs. The gradients
of its weights and inputs are those of this rank's tokens; their sum over the ranks is the whole gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.nn import functional

from ds_npu.comm.crossing import collect
from ds_npu.comm.host_copy import copy_to_device
from ds_npu.features.context_parallel.visibility import Visibility
from ds_npu.ops.attention import Mask
from ds_npu.parallel.context.axis import ContextAxis
from ds_npu.parallel.context.load_balance import Tokens
from ds_npu.parallel.runtime.micro_batch import Fact, MicroBatch, running
from ds_npu.parallel.tensor.axis import SEQUENCE_DIM


@dataclass(frozen=True, eq=False)
class ShardedBatch:
    """A batch of ``samples`` sequences and this rank's shard of their tokens."""

    samples: int
    tokens: Tokens
    axis: ContextAxis
    device: torch.device
    visibility: Visibility
    last_position: torch.Tensor
    """The largest position of the batch, on the device."""
    gathers_routers: bool = False
    """Whether the loss has an auxiliary part, which needs the router logits of all tokens."""

    @property
    def count(self) -> int:
        """How many tokens of each sample this rank holds."""
        return self.tokens.count(self.axis.rank)

    @property
    def group(self) -> dist.ProcessGroup:
        """The context ranks."""
        group: dist.ProcessGroup = self.axis.topology.group("cp")
        return group

    @cached_property
    def index(self) -> torch.Tensor:
        """Indices in their sequences of this rank's tokens: int64 [B, tokens]; [1, tokens] where samples are alike."""
        return copy_to_device(self.tokens.index(self.axis.rank), self.device)

    @cached_property
    def gather_index(self) -> torch.Tensor:
        """Where each token of a sequence stands in the gathered shards, each padded to the longest: int64 [B, S]."""
        longest = self.longest
        found = torch.empty(self.tokens.samples, self.tokens.length, dtype=torch.int64)
        for rank in range(self.axis.size):
            index = self.tokens.index(rank)
            found.scatter_(1, index, torch.arange(index.shape[1]).expand_as(index) + rank * longest)
        return copy_to_device(found, self.device)

    @property
    def longest(self) -> int:
        """The most tokens of a sample that a rank holds."""
        return max(self.tokens.count(rank) for rank in range(self.axis.size))

    def shard(self, x: torch.Tensor, dim: int = SEQUENCE_DIM) -> torch.Tensor:
        """This rank's tokens of ``x``, whose ``dim`` is the sequence and the dim before it the samples (or 1)."""
        return _selected(x, dim, self.index)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All-gather ``x`` [B, this rank's tokens, ...] to [B, S, ...] in natural order, the same on every rank.

        Backward: the gradient is the same on every rank, and each keeps the slice of its own tokens.
        """
        missing = self.longest - x.shape[SEQUENCE_DIM]
        padded = functional.pad(x, (*(0, 0) * (x.dim() - SEQUENCE_DIM - 1), 0, missing)) if missing else x
        return _selected(collect(padded, SEQUENCE_DIM, self.group), SEQUENCE_DIM, self.gather_index)


def _selected(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    if len(index) == 1:
        return x.index_select(dim, index[0])
    shape = [1] * (dim - 1) + list(index.shape) + [1] * (x.dim() - dim - 1)
    return x.take_along_dim(index.view(shape), dim)


@dataclass(frozen=True, eq=False)
class SequenceShardMask:
    """The mask that a layer is given, with its batch.

    A layer that is recomputed in backward is passed it again, and reads the batch from here.
    """

    mask: Mask
    batch: ShardedBatch


class UnshardedBatch:
    """A batch of which every context rank computes all tokens (generation with a cache)."""


class RunningBatch:
    """The batch of the forward that runs, or is computed again, as its MicroBatch knows it."""

    def __init__(self) -> None:
        self._batch: Fact[ShardedBatch | UnshardedBatch] = Fact()

    def set(self, micro_batch: MicroBatch, batch: ShardedBatch | UnshardedBatch) -> None:
        self._batch.set(micro_batch, batch)

    @property
    def sharded(self) -> ShardedBatch | None:
        """The batch if its sequences are sharded, else None."""
        batch = self._batch.of(running())
        return batch if isinstance(batch, ShardedBatch) else None

    def require(self, who: str) -> ShardedBatch | UnshardedBatch:
        """The batch; raises RuntimeError where ``who`` is computed outside of a forward."""
        batch = self._batch.of(running())
        if batch is None:
            raise RuntimeError(
                f"{who} is computed outside of the forward of the model that ds_npu.parallel.context has sharded over "
                "its ranks, so it is not known which tokens it has: call the whole model, as engine(...)"
            )
        return batch
