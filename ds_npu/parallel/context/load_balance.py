"""Zigzag load balance: the tokens of a batch that each context rank has, as data that all ranks know.

A causal mask gives the last tokens more work than the first ones. So each document is divided into 2 * ring chunks, and
ring rank r has chunks r and 2 * ring - 1 - r (zigzag); the Ulysses ranks of a group share the tokens of a ring rank in
order. Source: Zhu 2024, ring-flash-attention, zigzag; Llama 3, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.parallel.tensor.sharding import joined_ranges, near_even

Pieces = tuple[range, ...]
"""Ascending, disjoint ranges of tokens."""


@dataclass(frozen=True)
class Tokens:
    """How ``samples`` sequences of ``length`` tokens are sharded over the context ranks; token s of sample b is number
    b * length + s.

    ``ring[r]`` are the tokens of ring rank r, the same number of each sample. Attention crosses no document; a token in
    none of the ``documents`` (padding) sees nothing. Where all samples of a batch are sharded alike and each is one
    document, one sample describes the batch (``samples`` 1, ``documents`` one).
    """

    samples: int
    length: int
    ulysses: int
    ring: tuple[Pieces, ...]
    documents: Pieces

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Plans are looked up by tokens in every layer, and there may be thousands of documents.
        return hash((self.samples, self.length, self.ulysses, self.ring, self.documents))

    @property
    def total(self) -> int:
        return self.samples * self.length

    def count(self, rank: int) -> int:
        """Tokens of each sample that context rank ``rank`` has."""
        begin, end = self._ulysses_range(rank)
        return end - begin

    @functools.cached_property
    def ring_token_counts(self) -> tuple[int, ...]:
        """Tokens of each sample that each ring rank, that is its whole Ulysses group, has."""
        return tuple(sum(map(len, pieces)) // self.samples for pieces in self.ring)

    def pieces(self, rank: int) -> Pieces:
        """The tokens of context rank ``rank``."""
        begin, end = self._ulysses_range(rank)
        size = self.ring_token_counts[rank // self.ulysses]
        wanted = [range(sample * size + begin, sample * size + end) for sample in range(self.samples)]
        return tuple(_selected(self.ring[rank // self.ulysses], wanted))

    def index(self, rank: int) -> torch.Tensor:
        """The positions, in their sequence, of the tokens of context rank ``rank``: int64 [samples, tokens]."""
        numbers = [torch.arange(piece.start, piece.stop) for piece in self.pieces(rank)]
        return torch.cat(numbers).view(self.samples, -1) % self.length

    def _ulysses_range(self, rank: int) -> tuple[int, int]:
        ring_rank, inside = divmod(rank, self.ulysses)
        return near_even(self.ring_token_counts[ring_rank], self.ulysses)[inside]


def shard_evenly(length: int, algorithm: ContextAlgorithm, zigzag: bool = True) -> Tokens:
    """Shard sequences of ``length`` tokens without padding or packing; without ``zigzag`` each rank's are contiguous.

    Raises ValueError for a sequence that is too short to give every rank a token.
    """
    _must_suffice(length, algorithm)
    if zigzag:
        return shard_documents(1, length, [range(length)], algorithm)
    ring = tuple((range(begin, end),) for begin, end in near_even(length, algorithm.ring))
    return Tokens(1, length, algorithm.ulysses, ring, (range(length),))


@functools.lru_cache(maxsize=64)
def _zigzag(documents: Pieces, ranks: int) -> tuple[Pieces, ...]:
    """The ring ranks' tokens of one sample, whose every token is in one of the ``documents``."""
    found: list[list[range]] = [[] for _ in range(ranks)]
    next_rank = 0
    for number, document in enumerate(documents):
        share, rest = divmod(len(document), 2 * ranks)
        sizes = [share] * (2 * ranks)
        # Deal left-over tokens to the ranks round robin: ranks get equal numbers of a sample, whatever its documents.
        for extra in range(rest):
            rank = (next_rank + extra) % ranks
            second = extra >= ranks
            sizes[2 * ranks - 1 - rank if second ^ (number % 2 == 1) else rank] += 1
        next_rank += rest
        bounds = itertools.pairwise(itertools.accumulate(sizes, initial=document.start))
        for chunk, (begin, end) in enumerate(bounds):
            if begin < end:
                found[min(chunk, 2 * ranks - 1 - chunk)].append(range(begin, end))
    return tuple(tuple(joined_ranges(pieces)) for pieces in found)


def shard_documents(samples: int, length: int, documents: Sequence[range], algorithm: ContextAlgorithm) -> Tokens:
    """Shard packed or padded sequences, each document over all ring ranks (zigzag).

    ``documents`` ascend and lie within one sample each (token s of sample b is number b * length + s); tokens outside
    of them are padding. Raises ValueError for a sequence that is too short, or documents of another form.
    """
    _must_suffice(length, algorithm)
    ring: list[list[range]] = [[] for _ in range(algorithm.ring)]
    for sample, parts in enumerate(_by_sample(samples, length, documents)):
        offset = sample * length
        for pieces, found in zip(ring, _zigzag(parts, algorithm.ring), strict=True):
            pieces += [range(offset + piece.start, offset + piece.stop) for piece in found]
    return Tokens(samples, length, algorithm.ulysses, tuple(tuple(each) for each in ring), tuple(documents))


def _by_sample(samples: int, length: int, documents: Sequence[range]) -> Iterator[Pieces]:
    """Each sample as its documents and the padding between them, counted from its first token."""
    inside = [bool(each) and each.start // length == (each.stop - 1) // length < samples for each in documents]
    ascend = [one.stop <= other.start for one, other in itertools.pairwise((range(0), *documents))]
    if not all(inside) or not all(ascend):
        raise ValueError(
            f"documents must ascend, each within one of {samples} samples of {length} tokens; found {list(documents)}"
        )
    for sample in range(samples):
        mine = [each for each in documents if each.start // length == sample]
        ends = itertools.chain(*((each.start, each.stop) for each in mine))
        bounds = [sample * length, *ends, (sample + 1) * length]
        yield tuple(range(a - bounds[0], b - bounds[0]) for a, b in itertools.pairwise(bounds) if a < b)


def _must_suffice(length: int, algorithm: ContextAlgorithm) -> None:
    if length < algorithm.fewest_tokens:
        raise ValueError(
            f"a sequence of {length} tokens is too short for {algorithm.size} ranks of ds_npu.parallel.context with "
            f"algorithm {algorithm.name!r}: found {length}, at least {algorithm.fewest_tokens} are needed"
        )


def _selected(pieces: Pieces, wanted: Sequence[range]) -> Iterator[range]:
    """Yield the ranges of tokens whose indices among the tokens of ``pieces`` are ``wanted`` (ascending)."""
    offset, targets = 0, list(wanted)
    for piece in pieces:
        for target in targets:
            begin = max(target.start - offset, 0)
            end = min(target.stop - offset, len(piece))
            if begin < end:
                yield range(piece.start + begin, piece.start + end)
        offset += len(piece)
        targets = [target for target in targets if target.stop > offset]
