"""Records of all ranks put together: the tensors of the plain model and of whole samples, whatever the layout was."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ds_npu.comparison.dump_reader import DumpedRun, DumpReadError, RankRecords
from ds_npu.comparison.rounding import Numbers, least_error
from ds_npu.comparison.weight_elements import WeightElements
from ds_npu.dump_hooks import GRADIENT, STATE, WEIGHT, Record

OF_WEIGHTS = (WEIGHT, GRADIENT, STATE)
Part = tuple[RankRecords, Record]


@dataclass
class MergedWeight:
    """One weight of a step, its gradient or one of its states, from the parts of all ranks."""

    numbers: Numbers
    dtype: str
    order: tuple[int, ...]
    shape: tuple[int, ...]
    fingerprint: int | None
    """A hash of the bits of a weight's elements; None for gradients and states."""
    parts: Mapping[str, Part]
    """The record of each part, by the ranges and window of the part; of several copies the most frequent one."""
    prints: Mapping[str, str]
    differing: tuple[int, ...] = ()
    """Ranks whose copy of a part differs from the most frequent one."""
    apart: float = 0.0
    """The largest error between two copies of a part, as far as statistics tell."""

    def whole(self, run: DumpedRun, step: int) -> torch.Tensor | None:
        """Its values, flat in the plain order, on the host; None where statistics alone were dumped."""
        found: torch.Tensor | None = None
        for rank, record in self.parts.values():
            values = run.tensor(step, rank.rank, record)
            if values is None:
                return None
            if found is None:
                found = torch.empty(math.prod(self.shape), dtype=values.dtype)
            found[elements_of(record).indices(0, values.numel())] = values.reshape(-1)
        return found


@dataclass
class SamplePieces:
    """One sample's part of an output or of its gradient, from all ranks that hold tokens of it."""

    where: tuple[int, int, int]
    """Data rank, micro-batch and row in it."""
    numbers: Numbers = field(default_factory=Numbers)
    tokens: dict[str, tuple[int, Record, int]] = field(default_factory=dict)
    """The first rank that holds tokens, its record, and their row in the record, by the runs of the tokens' numbers."""
    copies: dict[str, list[tuple[int, Numbers]]] = field(default_factory=dict)
    """Every rank that holds tokens, with its statistics, by the runs of the tokens' numbers."""

    def whole(self, run: DumpedRun, step: int) -> torch.Tensor | None:
        """Its values [tokens, ...], in the order of tokens, on the host; None where statistics alone were dumped."""
        found: list[tuple[int, torch.Tensor]] = []
        for runs, (rank, record, row) in self.tokens.items():
            values = run.tensor(step, rank, record)
            if values is None:
                return None
            own: torch.Tensor = values[row] * record.get("factor", 1.0)
            if runs == "":
                return own
            numbers = torch.cat([_numbers(*each) for each in _parsed(runs)])
            own = own.reshape(len(numbers), -1)
            found += [(int(number), token) for number, token in zip(numbers, own, strict=True) if number >= 0]
        return torch.stack([token for _, token in sorted(found, key=lambda each: each[0])])


@dataclass
class MergedOutput:
    """The output of one module in a step, or its gradient: pieces by sample, in the order of micro-batches."""

    dtype: str
    order: tuple[int, ...]
    samples: dict[str, list[SamplePieces]] = field(default_factory=dict)

    def differing(self, explained: float) -> list[int]:
        """Ranks whose copy is off the usual one by more than the relative error ``explained``.

        The usual copy of the same tokens is that with the most copies near it; of equals the first rank's.
        """
        found: set[int] = set()
        for held in (copies for own in self.samples.values() for pieces in own for copies in pieces.copies.values()):
            if all(least_error(held[0][1], other) <= explained for _, other in held[1:]):
                continue
            off = [[rank for rank, other in held if least_error(each, other) > explained] for _, each in held]
            fewest: list[int] = min(off, key=len)
            found.update(fewest)
        return sorted(found)


def elements_of(record: Record) -> WeightElements:
    """The elements of the whole weight that ``record`` covers."""
    dims = {
        int(dim): torch.cat([torch.arange(*each) for each in ranges])
        for dim, ranges in record.get("ranges", {}).items()
    }
    return WeightElements(tuple(record["shape"]), dims, record.get("window", [0])[0])


def numbers_of(record: Record, row: int = 0) -> Numbers:
    """The statistics of one row of ``record``, times its factor."""
    names = ("sum", "squares", "min", "max")
    found = Numbers(record["count"][row], *(record[name][row] for name in names))
    return found.scaled(record.get("factor", 1.0))


def print_of(record: Record) -> str:
    """A text that equal copies of a part share: the hash of a weight's bits; of other tensors the statistics."""
    found: str = record.get("fingerprint") or f"{record['sum']} {record['squares']} {record['min']} {record['max']}"
    return found


def merged_weights(run: DumpedRun, step: int) -> dict[tuple[str, str, str], MergedWeight]:
    """Weights, gradients and states of ``step``, by kind, name and state; raises DumpReadError for missing elements."""
    parts: dict[tuple[str, str, str], list[Part]] = {}
    for rank, record in run.parts(step):
        if record["kind"] in OF_WEIGHTS:
            parts.setdefault((record["kind"], record["name"], record.get("state", "")), []).append((rank, record))
    return {key: _merged(run, step, key, own) for key, own in parts.items()}


def _merged(run: DumpedRun, step: int, key: tuple[str, str, str], parts: Sequence[Part]) -> MergedWeight:
    held: dict[str, list[Part]] = {}
    for rank, record in parts:
        held.setdefault(f"{record.get('ranges', '')} {record.get('window', '')}", []).append((rank, record))
    numbers, apart = Numbers(), 0.0
    differing: list[int] = []
    chosen: dict[str, Part] = {}
    for where, copies in held.items():
        usual, _ = Counter(print_of(record) for _, record in copies).most_common(1)[0]
        chosen[where] = next(each for each in copies if print_of(each[1]) == usual)
        own = numbers_of(chosen[where][1])
        odd = [(rank.rank, record) for rank, record in copies if print_of(record) != usual]
        differing += [rank for rank, _ in odd]
        apart = max([apart, *(least_error(own, numbers_of(record)) for _, record in odd)])
        numbers.add(own)
    first = parts[0][1]
    shape = tuple(first["shape"])
    if numbers.count != math.prod(shape):
        kind, name, state = key
        raise DumpReadError(
            f"{run.folder}: step {step}: {kind} {name} {state}has {numbers.count} of {math.prod(shape)} elements"
        )
    prints = {where: print_of(record) for where, (_, record) in chosen.items()}
    total = sum(int(each, 16) for each in prints.values()) % 2**64 if key[0] == WEIGHT else None
    order = tuple(first["order"])
    return MergedWeight(
        numbers, first["dtype"], order, shape, total, chosen, prints, tuple(sorted(set(differing))), apart
    )


def merged_outputs(run: DumpedRun, step: int) -> dict[tuple[str, str], MergedOutput]:
    """Outputs and their gradients of ``step``, by kind and module."""
    found: dict[tuple[str, str], MergedOutput] = {}
    seen: dict[tuple[object, ...], SamplePieces] = {}
    for rank, record in run.parts(step):
        if record["kind"] in OF_WEIGHTS:
            continue
        key = (record["kind"], record["name"])
        merged = found.setdefault(key, MergedOutput(record["dtype"], tuple(record["order"])))
        batch = rank.batches[record["batch"]]
        for row, sample in enumerate(batch["samples"]):
            where = (rank.coordinates.get("dp", 0), batch["micro_batch"], row)
            if (key, where) not in seen:
                seen[key, where] = SamplePieces(where)
                merged.samples.setdefault(sample, []).append(seen[key, where])
            _add_piece(seen[key, where], rank.rank, record, row, _runs_text(batch["tokens"], row))
    for merged in found.values():
        for pieces in merged.samples.values():
            pieces.sort(key=lambda each: each.where)
    return found


def _add_piece(pieces: SamplePieces, rank: int, record: Record, row: int, runs: str) -> None:
    numbers = numbers_of(record, row)
    pieces.copies.setdefault(runs, []).append((rank, numbers))
    if runs not in pieces.tokens:
        pieces.tokens[runs] = (rank, record, row)
        pieces.numbers.add(numbers)


def _runs_text(tokens: Sequence[Sequence[Sequence[int]]] | None, row: int) -> str:
    if tokens is None:
        return ""
    own = tokens[row if len(tokens) > 1 else 0]
    return " ".join(f"{first}:{count}" for first, count in own)


def _parsed(runs: str) -> Iterable[tuple[int, int]]:
    for each in runs.split():
        first, count = each.split(":")
        yield int(first), int(count)


def _numbers(first: int, count: int) -> torch.Tensor:
    return torch.full((count,), -1) if first < 0 else torch.arange(first, first + count)


def tokens_of(pieces: SamplePieces) -> tuple[int, ...]:
    """The numbers of a sample's tokens that any rank holds, ascending; empty where the sample has no tokens."""
    numbers = (each for runs in pieces.tokens for each in _parsed(runs))
    return tuple(sorted(number for first, count in numbers if first >= 0 for number in range(first, first + count)))
