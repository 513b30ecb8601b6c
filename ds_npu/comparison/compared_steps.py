"""Two dumps step by step: how far each tensor is off, how far rounding brings it, and the first that is further off."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ds_npu.comparison.dump_reader import DumpedRun
from ds_npu.comparison.merged_records import (
    MergedOutput,
    MergedWeight,
    SamplePieces,
    merged_outputs,
    merged_weights,
    tokens_of,
)
from ds_npu.comparison.rounding import UNIT, Rounding, coarsest, error_of, least_error
from ds_npu.dump_hooks import GRADIENT, GRADIENT_OF_OUTPUT, OUTPUT, STATE, WEIGHT

KINDS = (WEIGHT, OUTPUT, GRADIENT_OF_OUTPUT, GRADIENT, STATE)
"""The kinds of records, in the order of execution within a step."""
SMALL = 16
"""Gradients and states are compared as if no root mean square were below the median's over this factor: a smaller one
may be nothing but rounding, as that of a bias of keys, which the softmax takes out."""
SQUARED = "exp_avg_sq"
Key = tuple[str, str]


@dataclass(frozen=True)
class Row:
    """The comparison of one tensor in both runs."""

    step: int
    kind: str
    name: str
    error: float
    explained: float
    detail: str = ""
    """The sample, or the ranks, in words."""

    @property
    def is_off(self) -> bool:
        return self.error > self.explained

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


@dataclass
class Comparison:
    """All tensors of two runs that both have, in the order of execution, and what could not be compared."""

    rows: list[Row] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    """Lines about tensors whose copies on ranks of one run differ."""
    notes: list[str] = field(default_factory=list)

    @property
    def off(self) -> list[Row]:
        """The tensors that are further off than rounding explains."""
        return [row for row in self.rows if row.is_off]

    def first_off(self, *kinds: str) -> Row | None:
        """The first tensor in ``off``; where ``kinds`` are given, the first of these."""
        return next((row for row in self.off if not kinds or row.kind in kinds), None)


class StepComparison:
    """One step of two runs.

    ``rounding_dtype``: the dtype of the rounding; None: the coarsest of both runs.
    """

    def __init__(self, runs: tuple[DumpedRun, DumpedRun], step: int, first: int, rounding_dtype: str | None) -> None:
        self.runs, self.step, self.first, self.is_first = runs, step, first, step == first
        self.weights = [merged_weights(run, step) for run in runs]
        self.outputs = [merged_outputs(run, step) for run in runs]
        self.names = _in_order([each for each in self.outputs[0] if each in self.outputs[1]], self.outputs[0])
        self.borders = max(len({name for _, name in self.names}), 1)
        dtypes = {each.dtype for found in self.outputs for each in found.values()}
        dtypes |= {each.dtype for found in self.weights for (kind, *_), each in found.items() if kind == WEIGHT}
        states = {each.dtype for found in self.weights for (kind, *_), each in found.items() if kind == STATE}
        shapes = [each.shape for (kind, *_), each in self.weights[0].items() if kind == WEIGHT and len(each.shape) > 1]
        terms = max((shape[-1] for shape in shapes), default=1)
        self.rounding = Rounding(rounding_dtype or coarsest(dtypes), terms)
        stepped = coarsest({self.rounding.dtype, *states})
        self.rounding_of_steps = Rounding(rounding_dtype or stepped, max(terms, self._tokens()))
        self.before = self.borders * (step - first)
        """The borders of earlier steps, whose roundings are in the weights."""

    def _tokens(self) -> int:
        """Tokens of the step, over which gradients of weights are summed."""
        merged = next((each for (kind, _), each in self.outputs[0].items() if kind == OUTPUT), None)
        pieces = [] if merged is None else [each for found in merged.samples.values() for each in found]
        return sum(max(len(tokens_of(each)), 1) for each in pieces)

    def of_weights(self, kind: str, comparison: Comparison) -> Iterator[Row]:
        """Compare weights, gradients or states.

        Weights of step 0 are compared bit by bit where their dtypes are the same.
        """
        both = [key for key in self.weights[0] if key[0] == kind and key in self.weights[1]]
        positions = {key: self.weights[0][key].order for key in both}
        middle = self._middle(kind, both)
        for key in sorted(both, key=lambda each: (positions[each], each)):
            a = self.weights[0][key]
            b = self.weights[1][key]
            name = f"{key[1]}{f', {key[2]}' if key[2] else ''}"
            ranks = [
                self._copies(comparison, run, kind, name, each) for run, each in zip(self.runs, (a, b), strict=True)
            ]
            explained = self._explained(kind, a, b)
            if kind == WEIGHT and a.fingerprint == b.fingerprint:
                error = 0.0
            elif explained == 0:
                error = max(self._weight_error(a, b, 0.0), 2**-53)
            else:
                error = self._weight_error(a, b, middle.get(key[2], 0.0))
            yield Row(self.step, kind, name, error, explained, _held_by(a, b) if error and not any(ranks) else "")

    def _explained(self, kind: str, a: MergedWeight, b: MergedWeight) -> float:
        if kind == WEIGHT and self.is_first:
            if self.step == 0:
                return 0.0 if a.dtype == b.dtype else UNIT[coarsest((a.dtype, b.dtype))]
            return self.rounding_of_steps.explains(self.step)
        if kind == WEIGHT:
            return self.rounding_of_steps.explains(self.step - self.first)
        rounding = self.rounding if self.is_first and kind == GRADIENT else self.rounding_of_steps
        rounding = Rounding(rounding.dtype, self.rounding_of_steps.terms)
        return rounding.explains(self.before + 2 * self.borders + (1 if kind == GRADIENT else 2))

    def _middle(self, kind: str, keys: Iterable[tuple[str, str, str]]) -> dict[str, float]:
        """For each state of ``kind`` the size as which smaller tensors are compared; none for weights."""
        sizes: dict[str, list[float]] = {}
        for key in keys:
            sizes.setdefault(key[2], []).append(self.weights[0][key].numbers.rms)
        if kind == WEIGHT:
            return {}
        return {state: statistics.median(own) / SMALL ** (1 + (state == SQUARED)) for state, own in sizes.items()}

    def _weight_error(self, a: MergedWeight, b: MergedWeight, floor: float) -> float:
        x, y = (each.whole(run, self.step) for run, each in zip(self.runs, (a, b), strict=True))
        return least_error(a.numbers, b.numbers, floor) if x is None or y is None else error_of(x, y, floor)

    def _copies(self, comparison: Comparison, run: DumpedRun, kind: str, name: str, merged: MergedWeight) -> bool:
        explained = 0.0 if kind == WEIGHT else self._explained(kind, merged, merged)
        if not merged.differing or (kind != WEIGHT and merged.apart <= explained):
            return False
        ranks = _listed(merged.differing)
        comparison.copies.append(f"step {self.step}: {run.folder}: {ranks} another {kind} {name} than its copies")
        return True

    def of_outputs(self, kind: str, comparison: Comparison) -> Iterator[Row]:
        """Compare outputs in the order of execution, or their gradients in the order of backward."""
        names = [key for key in self.names if key[0] == kind]
        depth = {name: index for index, (_, name) in enumerate(each for each in self.names if each[0] == OUTPUT)}
        for key in names if kind == OUTPUT else reversed(names):
            index = depth.get(key[1], 0)
            borders = self.before + (index + 1 if kind == OUTPUT else 2 * self.borders - index)
            explained = (self.rounding if self.is_first else self.rounding_of_steps).explains(borders)
            a = self.outputs[0][key]
            b = self.outputs[1][key]
            for run, merged in zip(self.runs, (a, b), strict=True):
                if ranks := merged.differing(explained):
                    what = f"another {kind} of {key[1]} than its copies"
                    comparison.copies.append(f"step {self.step}: {run.folder}: {_listed(ranks)} {what}")
            yield self._row_of_output(key, a, b, explained)

    def _row_of_output(self, key: tuple[str, str], a: MergedOutput, b: MergedOutput, explained: float) -> Row:
        worst, detail = 0.0, ""
        for sample in a.samples.keys() & b.samples.keys():
            for x, y in zip(a.samples[sample], b.samples[sample], strict=False):
                error = self._sample_error(x, y)
                if error > worst:
                    worst = error
                    detail = f"sample {sample[:8]}, micro-batch {x.where[1]} of data rank {x.where[0]} in A"
        return Row(self.step, key[0], key[1], worst, explained, detail)

    def _sample_error(self, a: SamplePieces, b: SamplePieces) -> float:
        x = a.whole(self.runs[0], self.step)
        y = b.whole(self.runs[1], self.step)
        return least_error(a.numbers, b.numbers) if x is None or y is None else error_of(x, y)

    def differing_samples(self) -> tuple[int, int]:
        """How many samples of this step A has and B has not, or has other tokens of; and the reverse."""
        found = []
        for mine, other in ((0, 1), (1, 0)):
            key = next((each for each in self.names if each[0] == OUTPUT), None)
            if key is None:
                return 0, 0
            a = self.outputs[mine][key].samples
            b = self.outputs[other][key].samples
            alike = [
                sum(tokens_of(x) == tokens_of(y) for x, y in zip(own, b.get(sample, ()), strict=False))
                for sample, own in a.items()
            ]
            found.append(sum(map(len, a.values())) - sum(alike))
        return found[0], found[1]

    def without_gradients(self) -> Iterator[str]:
        """How many outputs have no gradient in one of the runs, in words."""
        for letter, outputs in zip("AB", self.outputs, strict=True):
            found = [name for kind, name in outputs if kind == OUTPUT and (GRADIENT_OF_OUTPUT, name) not in outputs]
            if found:
                why = "nothing before them is trained, or a reentrant checkpoint computes them again"
                yield f"step {self.step}: {len(found)} outputs of {letter} have no gradient ({found[0]}): {why}"

    def only_in_one(self) -> Iterator[str]:
        """Names of outputs and weights that one run alone has recorded, in words."""
        for letter, mine, other in (("A", 0, 1), ("B", 1, 0)):
            for kind in KINDS:
                own = [key[1] for key in (*self.weights[mine], *self.outputs[mine]) if key[0] == kind]
                there = {key[1] for key in (*self.weights[other], *self.outputs[other]) if key[0] == kind}
                alone = list(dict.fromkeys(name for name in own if name not in there))
                if alone:
                    more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
                    yield f"step {self.step}: only {letter} has the {kind} of {alone[0]}{more}"


def compared(a: DumpedRun, b: DumpedRun, rounding_dtype: str | None = None) -> Comparison:
    """Compare the steps that both runs have; it ends behind the first step whose samples differ.

    Raises DumpReadError where records are missing.
    """
    comparison = Comparison()
    steps = sorted(a.steps.keys() & b.steps.keys())
    for letter, run, other in (("A", a, b), ("B", b, a)):
        for step in sorted(run.steps.keys() - other.steps.keys()):
            comparison.notes.append(f"step {step} is only in {letter}")
    for step in steps:
        both = StepComparison((a, b), step, steps[0], rounding_dtype)
        comparison.notes += both.only_in_one()
        comparison.rows += both.of_weights(WEIGHT, comparison)
        for kind in (OUTPUT, GRADIENT_OF_OUTPUT):
            comparison.rows += both.of_outputs(kind, comparison)
        in_a, in_b = both.differing_samples()
        if in_a or in_b:
            comparison.notes.append(
                f"step {step}: {in_a} samples are only in A and {in_b} only in B: gradients, and all behind this step, "
                "are not compared"
            )
            break
        for kind in (GRADIENT, STATE):
            comparison.rows += both.of_weights(kind, comparison)
        comparison.notes += both.without_gradients()
        comparison.notes.append(f"step {step}: rounding of {both.rounding}")
    return comparison


def _in_order(
    keys: Sequence[tuple[str, str]], outputs: Mapping[tuple[str, str], MergedOutput]
) -> list[tuple[str, str]]:
    return sorted(keys, key=lambda key: (outputs[key].order, key))


def _held_by(a: MergedWeight, b: MergedWeight) -> str:
    """The ranks of B whose parts differ, where both runs have the same parts."""
    if a.prints.keys() != b.prints.keys() or len(a.prints) == 1:
        return ""
    ranks = [part[0].rank for where, part in b.parts.items() if b.prints[where] != a.prints[where]]
    return f"the part of {_ranks(ranks)} of B" if ranks else ""


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{' ...' if len(ranks) > 8 else ''}"


def _listed(ranks: Sequence[int]) -> str:
    return f"{_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}"
