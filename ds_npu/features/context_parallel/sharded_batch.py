"""One batch sharded over the context ranks: which tokens are this rank's, and how results of all ranks are gathered.

A model's inputs and outputs are the same on every context rank, and so are the gradients of its outputs. The gradients
of its weights and inputs are those of this rank's tokens; their sum over the ranks is the whole gradient.

The keys that tokens see within the band of their layer are read once from the arguments of a forward. A Hugging Face
model takes padding as an ``attention_mask`` [B, S], packed documents as ``position_ids`` that restart or as
``cu_seq_lens_q``, and anything else as a mask of four dims. They mean what they mean in transformers (masking_utils,
5.23), except that a row of padding sees nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from ds_npu.comm.crossing import collect
from ds_npu.comm.host_copy import copy_to_device
from ds_npu.models.attention_function import hidden_of
from ds_npu.models.logits import IGNORED_LABEL
from ds_npu.ops.attention import Mask
from ds_npu.parallel.context.axis import ContextAxis
from ds_npu.parallel.context.load_balance import Tokens
from ds_npu.parallel.context.token_runs import TokenRuns, on_device, token_runs
from ds_npu.parallel.runtime.calls import Keywords
from ds_npu.parallel.runtime.micro_batch import Fact, MicroBatch, running
from ds_npu.parallel.tensor.axis import SEQUENCE_DIM

CUMULATIVE = ("cu_seq_lens_q", "cu_seq_lens_k")
VISIBILITY_ARGUMENTS = ("attention_mask", *CUMULATIVE, "max_length_q", "max_length_k", "seq_idx")
"""Arguments that are read here and not passed on to the model (seq_idx numbers packed documents; it is
read where no other argument tells of them)."""


@dataclass(frozen=True, eq=False)
class Visibility:
    """Documents (ranges of b * S + s; None: each sample is one), or padding, or a mask of the user's."""

    documents: tuple[range, ...] | None = None
    padding: torch.Tensor | None = None
    """[B, S], True for keys that no row sees, where documents cannot express them."""
    dense: torch.Tensor | None = None
    """[B or 1, N or 1, S, S], True where a row does not see a key; it includes the layer's band."""


EVERYTHING = Visibility()


@dataclass(frozen=True)
class BatchArguments:
    """A batch as the script gives it: ``samples`` sequences of ``length`` tokens, and the arguments of the forward."""

    samples: int
    length: int
    given: Keywords
    targets: torch.Tensor | None = None
    """[B, S]: the label that each token is to predict."""
    ignored: int = IGNORED_LABEL
    """The label of tokens without a target."""
    shifted: bool = True
    """Whether a token predicts the next one: then the last token of padding on the left has a target."""

    def visibility(self) -> Visibility:
        """The Visibility of the batch; raises ValueError for arguments that contradict each other or are not known."""
        mask = self.given.get("attention_mask")
        ends = [self.given.get(name) for name in CUMULATIVE]
        if any(each is not None for each in ends):
            if mask is not None or any(each is None for each in ends):
                raise ValueError(
                    "packed documents are given by cu_seq_lens_q and cu_seq_lens_k together and without an "
                    "attention_mask: either says which keys are seen"
                )
            return Visibility(self._cumulative(*ends))
        if mask is None:
            packed = self._packed(self.given.get("position_ids"))
            numbers = self.given.get("seq_idx")
            return self._numbered(numbers) if packed is EVERYTHING and numbers is not None else packed
        if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4):
            found = f"{mask.dim()} dims" if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise ValueError(f"attention_mask: found {found}; [B, S] or [B, N, S, S] is accepted")
        return self._padded(mask) if mask.dim() == 2 else Visibility(dense=self._whole(mask))

    def _cumulative(self, ends_q: Any, ends_k: Any) -> tuple[range, ...]:
        # The host waits for the device, once a batch: the shards depend on the documents.
        found, keys = (each.tolist() for each in (ends_q, ends_k))
        if self.samples != 1 or found != keys or found[:1] != [0] or found[-1] != self.length:
            raise ValueError(
                f"cu_seq_lens_q {found} and cu_seq_lens_k {keys} with a batch of {self.samples} x {self.length} "
                f"tokens: packed documents come in a batch of 1, both are the same, from 0 to {self.length}"
            )
        return tuple(range(begin, end) for begin, end in itertools.pairwise(found) if end > begin)

    def _numbered(self, numbers: Any) -> Visibility:
        """Documents by ``seq_idx`` [B, S]: the number of each token's document, ascending."""
        if not isinstance(numbers, torch.Tensor) or numbers.shape != (self.samples, self.length):
            found = list(numbers.shape) if isinstance(numbers, torch.Tensor) else type(numbers).__name__
            raise ValueError(f"seq_idx: found {found}; [{self.samples}, {self.length}] is accepted")
        return self._begun(numbers[:, 1:] != numbers[:, :-1])

    def _packed(self, positions: torch.Tensor | None) -> Visibility:
        """Documents by ``positions``: a position that is not its predecessor plus one begins a document."""
        if positions is None or (positions.dim() == 3 and len(positions) != 4):
            return EVERYTHING
        # Qwen2-VL has four rows of positions; the first is that of the text.
        rows = positions[0] if positions.dim() == 3 else positions
        return self._begun(rows[:, 1:] != rows[:, :-1] + 1)

    def _begun(self, begins: torch.Tensor) -> Visibility:
        """Documents that begin where ``begins`` [B or 1, S - 1], of all tokens but the first, is true."""
        # The host waits, as above, once a batch.
        begins = begins.cpu()
        if not begins.any():
            return EVERYTHING
        starts = [(row.nonzero().flatten() + 1).tolist() for row in begins.expand(self.samples, -1)]
        return Visibility(
            tuple(
                range(sample * self.length + begin, sample * self.length + end)
                for sample, inside in enumerate(starts)
                for begin, end in itertools.pairwise((0, *inside, self.length))
            )
        )

    def _padded(self, mask: torch.Tensor) -> Visibility:
        if mask.shape != (self.samples, self.length):
            raise ValueError(f"attention_mask: found {list(mask.shape)}; [{self.samples}, {self.length}] is accepted")
        counted = torch.zeros_like(mask) if self.targets is None else self.targets != self.ignored
        # The host waits, as above, once a batch.
        seen, counted = torch.stack([mask != 0, counted != 0]).cpu()
        if seen.all():
            return EVERYTHING
        documents = []
        for sample, (tokens, targets) in enumerate(zip(seen, counted, strict=True)):
            positions = tokens.nonzero().flatten()
            if not len(positions):
                continue
            first = int(positions[0])
            past = int(positions[-1]) + 1
            # A row of padding with a target counts in the loss; what it sees only a mask can say, not documents.
            counts = targets[past:].any() or (not self.shifted and targets[:first].any())
            if past - first != len(positions) or counts:
                return Visibility(padding=mask == 0)
            documents.append(range(sample * self.length + first, sample * self.length + past))
        return Visibility(tuple(documents))

    def _whole(self, mask: torch.Tensor) -> torch.Tensor:
        size = self.length
        if mask.shape[0] not in (1, self.samples) or mask.shape[2] not in (1, size) or mask.shape[3] != size:
            raise ValueError(
                f"attention_mask: found {list(mask.shape)}; [{self.samples}, N, {size}, {size}], the mask of the whole "
                "sequences, is accepted"
            )
        hidden: torch.Tensor = hidden_of(mask)
        return hidden.expand(-1, -1, size, -1)


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
    _runs: dict[int, TokenRuns] = field(default_factory=dict, init=False)

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

    @cached_property
    def kept(self) -> torch.Tensor | None:
        """[B, this rank's tokens, 1], False for padding, which transformers' linear attention takes as zeros; None
        where there is none."""
        padding = self.visibility.padding
        documents = self.visibility.documents
        size = self.samples * self.tokens.length
        if padding is None and (documents is None or sum(map(len, documents)) == size):
            return None
        if padding is None:
            outside = torch.ones(size, dtype=torch.bool)
            for each in documents or ():
                outside[each.start : each.stop] = False
            padding = copy_to_device(outside.view(self.samples, -1), self.device)
        return ~self.shard(padding)[..., None]

    def runs(self, width: int) -> TokenRuns:
        """This rank's runs of consecutive tokens, for layers with a convolution of ``width`` tokens."""
        if width not in self._runs:
            found = token_runs(self.tokens, self.axis.size, self.axis.rank, self.samples, width)
            self._runs[width] = on_device(found, self.device)
        return self._runs[width]

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
    """The batch of the forward that runs, or is recomputed: a Fact of the forward's MicroBatch."""

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
