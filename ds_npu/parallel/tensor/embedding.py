"""The vocabulary-parallel embedding: its rows, one for each word, are sharded over the tensor ranks.

Source: Megatron-LM, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import torch
from torch import nn

from ds_npu.comm.crossing import reduce
from ds_npu.parallel.runtime.placement import keep_shard
from ds_npu.parallel.tensor.shard_access import allow_shard_access
from ds_npu.parallel.tensor.sharding import shard_sections
from ds_npu.parallel.tensor.whole_weight import ShowsWhole
from ds_npu.topology.topology import Topology


class VocabParallelEmbedding(ShowsWhole, nn.Embedding):
    """nn.Embedding of which each tensor rank holds a range of the rows: ``weight`` [rows of this rank, H].

    The vocabulary is sharded near-evenly (13 words over 4 ranks: 4, 3, 3, 3). A forward sends one message, an
    all-reduce of the result; a backward sends none. ``num_embeddings`` is that of the whole vocabulary;
    ``padding_idx`` is the row of this rank's shard that is the padding, None on the other ranks.

    Its weight is a shard of the weight that nn.Embedding draws from the same seed. ``adopt`` shards an existing
    embedding.

    Raises ValueError for a vocabulary of fewer words than tensor ranks.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        topology: Topology,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._look_up_in(_keep_rows(self, topology), topology)

    @classmethod
    def adopt(cls, embedding: nn.Embedding, topology: Topology) -> VocabParallelEmbedding:
        """Make ``embedding`` a vocabulary-parallel one in place; its weight is the same Parameter too.

        A subclass of nn.Embedding may change the result of the lookup (Gemma scales it), on each rank's rows. A weight
        that is already sharded the same way, since it is tied to a head that came first, is kept. Raises ValueError as
        ``check_adoptable`` does.
        """
        if isinstance(embedding, cls):
            return embedding
        check_adoptable(embedding, topology.size("tp"))
        rows = _keep_rows(embedding, topology)
        object.__setattr__(embedding, "__class__", cls._of(type(embedding)))
        assert isinstance(embedding, cls)
        embedding._look_up_in(rows, topology)
        return embedding

    @classmethod
    def _of(cls, kind: type[nn.Embedding]) -> type[nn.Embedding]:
        if issubclass(cls, kind):
            return cls
        return type(f"VocabParallel{kind.__name__}", (cls, kind), {})

    def _look_up_in(self, rows: tuple[int, int], topology: Topology) -> None:
        # ZeRO-3 gives the weight its shape in forward only, so keep these numbers.
        self.first_row, end = rows
        self.rows = end - self.first_row
        if self.padding_idx is not None:
            row = self.padding_idx - self.first_row
            self.padding_idx = row if 0 <= row < self.rows else None
        self.tensor_group = topology.group("tp")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The rows of the word numbers ``input`` [...]: [..., H], the same on every tensor rank.

        Raises IndexError for a number outside of the vocabulary on the CPU. On a device this check would wait for it:
        there the first or the last tensor rank looks such a number up, and torch's embedding fails as without shards.
        """
        if self.rows == self.num_embeddings:
            return super().forward(input)
        if input.device.type == "cpu" and bool(((input < 0) | (input >= self.num_embeddings)).any()):
            raise IndexError(
                f"word numbers from {int(input.min())} to {int(input.max())} were given to an embedding of "
                f"{self.num_embeddings} words"
            )
        local = input - self.first_row
        if self.first_row == 0:
            elsewhere = local >= self.rows
        elif self.first_row + self.rows == self.num_embeddings:
            elsewhere = local < 0
        else:
            elsewhere = (local < 0) | (local >= self.rows)
        # Words of other ranks look up row 0; the result is replaced by 0, and so is its gradient.
        with allow_shard_access():  # The lookup may be that of a user's subclass of nn.Embedding.
            found = super().forward(local.masked_fill(elsewhere, 0))
        found = found.masked_fill_(elsewhere.unsqueeze(-1), 0)
        return reduce(found, self.tensor_group)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rows {self.first_row} to {self.first_row + self.rows - 1} here"


def check_adoptable(embedding: nn.Embedding, size: int) -> None:
    """Raise ValueError for max_norm, scale_grad_by_freq and sparse.

    They would include the lookups of row 0 that stand for other ranks' words.
    """
    asked = {
        "max_norm": embedding.max_norm is not None,
        "scale_grad_by_freq": embedding.scale_grad_by_freq,
        "sparse": embedding.sparse,
    }
    refused = [name for name, on in asked.items() if on]
    if refused:
        raise ValueError(
            f"an embedding of {embedding.num_embeddings} words with {', '.join(refused)} cannot be sharded over "
            f"{size} tensor ranks: leave {', '.join(refused)} out, or the tensor degree at 1"
        )


def _keep_rows(embedding: nn.Embedding, topology: Topology) -> tuple[int, int]:
    """Reduce the weight to this rank's rows, in place; returns their range."""
    sharding = shard_sections(0, [embedding.num_embeddings], topology.size("tp"))
    rank = topology.rank("tp")
    keep_shard(embedding.get_parameter("weight"), sharding, rank)
    (rows,) = sharding.ranges[rank]
    return rows
