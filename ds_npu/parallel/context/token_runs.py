"""The runs of consecutive tokens that each context rank holds, and the order in which a state passes through them.

A rank computes its runs side by side, as rows of one batch. After a run the state goes to the run that continues the
document, on whichever rank that is.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from dataclasses import dataclass

import torch
from torch.nn import functional

from ds_npu.comm.host_copy import copy_to_device
from ds_npu.parallel.context.load_balance import Tokens

Level = tuple[torch.Tensor, torch.Tensor]
"""The numbers of some runs, and for each the number of the run that continues its document."""


@dataclass(frozen=True, eq=False)
class TokenRuns:
    """The runs of context rank ``rank`` in a batch, as indices on one device; P runs of at most L tokens, T in all.

    Runs of all ranks are numbered rank * ``most`` + number on the rank, where ``most`` is the most runs of a rank.
    """

    ranks: int
    rank: int
    most: int
    rows: torch.Tensor
    """[P, L]: the place of each token among the rank's T tokens [B, tokens]; T behind the end of a run."""
    order: torch.Tensor
    """[T]: where each token stands among the P * L."""
    holds: torch.Tensor | None
    """[P, L]: False behind the end of a run; None where all runs have L tokens."""
    segments: torch.Tensor | None
    """[P, L]: the number of each token's document; None where each run has tokens of one."""
    levels: tuple[Level, ...]
    """Steps of the scan: the first passes states from runs that begin a document to the next runs, and so on."""
    tails: torch.Tensor
    """[P, W - 1]: the indices of each run's last tokens among the P * L; P * L in front of a shorter run."""
    halo: torch.Tensor
    """[P, W - 1]: the indices of the tokens before each run among the tails of all ranks.

    The number of all tails stands for a token before the document.
    """

    def arranged(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens [B, tokens, ...] as runs [P, L, ...]; zeros behind the end of a run."""
        return picked(x.flatten(0, 1), self.rows)

    def restored(self, x: torch.Tensor, samples: int) -> torch.Tensor:
        """Runs [P, L, ...] as this rank's tokens [B, tokens, ...]."""
        found = x.flatten(0, 1).index_select(0, self.order)
        return torch.unflatten(found, 0, (samples, -1))

    @property
    def mine(self) -> slice:
        """This rank's runs among those of all ranks."""
        return slice(self.rank * self.most, self.rank * self.most + len(self.rows))


def picked(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``rows``[``index``], with zeros for the index len(rows)."""
    padded = functional.pad(rows, (*(0, 0) * (rows.dim() - 1), 0, 1))
    return torch.unflatten(padded.index_select(0, index.flatten()), 0, index.shape)


@dataclass(frozen=True)
class _Sequences:
    """All runs of a batch, on the host: those of each rank, and where a document or padding begins."""

    by_rank: tuple[tuple[range, ...], ...]
    begins: tuple[int, ...]

    @functools.cached_property
    def ordered(self) -> list[tuple[range, int]]:
        """Every run and its number, in the order of the tokens."""
        most = self.most
        numbered = (
            (run, rank * most + number) for rank, runs in enumerate(self.by_rank) for number, run in enumerate(runs)
        )
        return sorted(numbered, key=lambda each: each[0].start)

    @property
    def most(self) -> int:
        return max(map(len, self.by_rank))

    def document(self, token: int) -> int:
        """The number of the document (or padding) that holds ``token``."""
        return bisect.bisect_right(self.begins, token) - 1

    def levels(self) -> list[list[tuple[int, int]]]:
        """Pairs (run, run that continues its document), one list for each distance from the document's first run."""
        found: list[list[tuple[int, int]]] = []
        depth = 0
        for (run, number), (behind, number_behind) in itertools.pairwise(self.ordered):
            depth = depth + 1 if run.stop == behind.start and behind.start not in self.begins else 0
            if depth:
                found += [[]] * (depth - len(found))
                found[depth - 1] = [*found[depth - 1], (number, number_behind)]
        return found

    def halo(self, run: range, width: int) -> list[int]:
        """The indices of the tokens before ``run`` among the tails of all ranks."""
        tails = width - 1
        first = self.begins[self.document(run.start)]
        nothing = len(self.by_rank) * self.most * tails
        found = []
        for token in range(run.start - tails, run.start):
            if token < first:
                found.append(nothing)
                continue
            at = bisect.bisect_right(self.ordered, token, key=lambda each: each[0].start) - 1
            holder, number = self.ordered[at]
            found.append(number * tails + token - holder.stop + tails)
        return found


@functools.lru_cache(maxsize=16)
def _sequences(tokens: Tokens, ranks: int, samples: int) -> _Sequences:
    """The runs of ``samples`` sequences, which may all be sharded as the one of ``tokens`` is."""
    offsets = [sample * tokens.length for sample in range(samples // tokens.samples)]

    def repeated(pieces: tuple[range, ...]) -> tuple[range, ...]:
        return tuple(range(offset + each.start, offset + each.stop) for offset in offsets for each in pieces)

    documents = repeated(tokens.documents)
    ends = (end for each in documents for end in (each.start, each.stop))
    begins = {*ends, *range(0, samples * tokens.length, tokens.length)} - {samples * tokens.length}
    return _Sequences(tuple(repeated(tokens.pieces(rank)) for rank in range(ranks)), tuple(sorted(begins)))


def token_runs(tokens: Tokens, ranks: int, rank: int, samples: int, width: int) -> TokenRuns:
    """The runs of ``rank`` of ``ranks`` in a batch of ``samples``, on the CPU, for convolutions of ``width`` tokens."""
    every = _sequences(tokens, ranks, samples)
    mine = every.by_rank[rank]
    longest = max(map(len, mine))
    lengths = torch.tensor([len(run) for run in mine])
    within = torch.arange(longest)
    holds = within < lengths[:, None]
    # A rank's tokens are those of its first sample, then those of the next one, each in ascending order.
    rows = torch.where(holds, (lengths.cumsum(0) - lengths)[:, None] + within, int(lengths.sum()))
    begins = torch.tensor(every.begins)
    starts = torch.tensor([run.start for run in mine])
    last = torch.tensor([run.stop - 1 for run in mine])
    numbers = torch.minimum(starts[:, None] + within, last[:, None])
    segments = torch.bucketize(numbers, begins, right=True)
    nothing = len(mine) * longest
    tail = lengths[:, None] - (width - 1) + torch.arange(width - 1)
    tails = torch.where(tail < 0, nothing, torch.arange(len(mine))[:, None] * longest + tail)
    levels = tuple(
        (torch.tensor([one for one, _ in level]), torch.tensor([other for _, other in level]))
        for level in every.levels()
    )
    return TokenRuns(
        ranks=ranks,
        rank=rank,
        most=every.most,
        rows=rows,
        order=holds.flatten().nonzero().flatten(),
        holds=None if bool(holds.all()) else holds,
        segments=segments if bool((segments != segments[:, :1]).any()) else None,
        levels=levels,
        tails=tails,
        halo=torch.tensor([every.halo(run, width) for run in mine]).view(len(mine), width - 1),
    )


def on_device(runs: TokenRuns, device: torch.device) -> TokenRuns:
    """``runs`` with its indices on ``device``."""

    def copied(x: torch.Tensor) -> torch.Tensor:
        return copy_to_device(x, device)

    return TokenRuns(
        ranks=runs.ranks,
        rank=runs.rank,
        most=runs.most,
        rows=copied(runs.rows),
        order=copied(runs.order),
        holds=None if runs.holds is None else copied(runs.holds),
        segments=None if runs.segments is None else copied(runs.segments),
        levels=tuple((copied(before), copied(after)) for before, after in runs.levels),
        tails=copied(runs.tails),
        halo=copied(runs.halo),
    )
