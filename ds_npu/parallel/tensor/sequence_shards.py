"""The shards of sequences over tensor ranks (Megatron sequence parallelism, arXiv:2205.05198), and their lengths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch.nn import functional

from ds_npu.comm.crossing import collect, shard
from ds_npu.parallel.runtime.calls import Keywords
from ds_npu.parallel.runtime.micro_batch import (
    SEQUENCE_LENGTH,
    Fact,
    MicroBatch,
    carried_by,
    new_forward,
    running,
    within,
)
from ds_npu.parallel.tensor.axis import SEQUENCE_DIM, TensorAxis


@dataclass(frozen=True, eq=False)
class SequenceShards:
    """The shards of sequences of ``length`` tokens over the tensor ranks (Megatron sequence parallelism).

    Sequences that tp does not divide are padded with zeros; the padding never enters a region.
    """

    axis: TensorAxis
    length: int

    @property
    def count(self) -> int:
        """The number of tokens of each sequence on a rank, with padding: S / tp, rounded up."""
        return -(-self.length // self.axis.size)

    def shard(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """This rank's [B, ceil(S / tp), H] of hidden states that are the same on every rank."""
        return shard(padded(x_BSH, self.axis.size), SEQUENCE_DIM, self.axis.group)

    def collect(self, x_BsH: torch.Tensor) -> torch.Tensor:
        """Gather [B, S, H], the same on every rank."""
        return self.unpad(collect(x_BsH, SEQUENCE_DIM, self.axis.group))

    def unpad(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """``x`` without the padding of its sequence: a view."""
        return x_BSH if x_BSH.shape[SEQUENCE_DIM] == self.length else x_BSH[:, : self.length]


class SequenceParallel:
    """The SequenceShards of each forward of one model, found by the hidden states in it."""

    def __init__(self, axis: TensorAxis) -> None:
        self.axis = axis
        self._shards: Fact[SequenceShards] = Fact()
        self._in_use: WeakSet[SequenceShards] = WeakSet()

    @contextmanager
    def new_forward(self, length: int) -> Iterator[tuple[MicroBatch, SequenceShards]]:
        """A context in a MicroBatch that knows the SequenceShards of ``length`` tokens.

        It is the running MicroBatch, or a new one where the running one knows SequenceShards already.
        """
        around = running()
        is_free = around is not None and self._shards.of(around) is None
        with within(around) if is_free else new_forward() as micro_batch:
            yield micro_batch, self._begin(micro_batch, length)

    def _begin(self, micro_batch: MicroBatch, length: int) -> SequenceShards:
        made = SequenceShards(self.axis, length)
        self._shards.set(micro_batch, made)
        self._in_use.add(made)
        return made

    def of(self, x_BsH: torch.Tensor, keywords: Keywords | None = None) -> SequenceShards:
        """The SequenceShards of the hidden states ``x`` of a module in a block; ``x`` then carries its MicroBatch."""
        micro_batch = running() or carried_by(x_BsH)
        if micro_batch is not None:
            micro_batch.carry_by(x_BsH)
        return self.find(micro_batch, x_BsH.shape[SEQUENCE_DIM], keywords)

    def find(
        self, micro_batch: MicroBatch | None, count: int | None = None, keywords: Keywords | None = None
    ) -> SequenceShards:
        """The SequenceShards that ``micro_batch`` knows, of ``count`` tokens a rank (None: any number).

        A part of a block that a user's checkpoint computes again is in no MicroBatch. Then the length is that of the
        ``position_ids`` or ``position_embeddings`` among ``keywords``, or that of the forwards whose hidden states
        still exist, where only one length is possible; else raises ValueError.
        """
        known = self._shards.of(micro_batch)
        if known is not None and count in (None, known.count):
            return known
        lengths = _length_told(keywords or {}) or {each.length for each in list(self._in_use)}
        fitting = [
            made for made in (SequenceShards(self.axis, each) for each in lengths) if count in (None, made.count)
        ]
        if len(fitting) != 1:
            found = "a sequence shard" if count is None else f"a sequence shard of {count} tokens"
            forwards = " and ".join(map(str, sorted(lengths))) or "no"
            raise ValueError(
                f"{found} is computed outside of the forward that it is of, and forwards of {forwards} tokens over "
                f"{self.axis.size} tensor ranks are known: checkpoint whole blocks, call backward before the next "
                "forward, or give the module its position_ids by name"
            )
        return fitting[0] if micro_batch is None or known is not None else self._begin(micro_batch, fitting[0].length)


def _length_told(keywords: Keywords) -> set[int]:
    """The length of the sequences as the arguments of an attention show it; empty where they do not."""
    if keywords.get("position_ids") is not None:
        return {keywords["position_ids"].shape[-1]}
    if keywords.get("position_embeddings") is not None:
        return {keywords["position_embeddings"][0].shape[-2]}
    return set()


def whole_length(x_BsH: torch.Tensor, keywords: Keywords) -> int:
    """The tokens of the sequences of which ``x``, from the stage before, is a shard. Raises ValueError if unknown."""
    told = _length_told(keywords)
    looked_up = SEQUENCE_LENGTH.of(running())
    if told:
        return told.pop()
    if looked_up is None:
        raise ValueError(
            f"ds_npu.parallel.sequence_parallel: a pipeline stage was sent shards {list(x_BsH.shape)} of sequences, "
            "and nothing tells their length: the model looked up no tokens, and gives its blocks no position_ids. "
            "What to do: give it input_ids in place of inputs_embeds, or sequence_parallel false"
        )
    return looked_up


def padded(x_BSH: torch.Tensor, multiple: int) -> torch.Tensor:
    """``x`` with zeros behind its sequence, up to a length that ``multiple`` divides."""
    missing = -x_BSH.shape[SEQUENCE_DIM] % multiple
    return functional.pad(x_BSH, (0, 0, 0, missing)) if missing else x_BSH
