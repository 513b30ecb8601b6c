"""How far apart rounding alone can bring the same tensor of two runs, as a relative error.

A number that is rounded to a dtype of unit roundoff u changes by u of itself at most, and independent roundings add up
as the root of their number. Between two neighbouring borders stand some OPERATIONS operators, each of which rounds its
results to the dtype; a sum of n products is accumulated in float32 at least, and rounds n times to that. So behind b
borders rounding explains SAFETY * sqrt(OPERATIONS * b) * (u + a * sqrt(n)), with a the unit roundoff of the
accumulation (Higham, Accuracy and Stability of Numerical Algorithms, 2002, sections 2.8 and 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

UNIT = {"float64": 2**-53, "float32": 2**-24, "tf32": 2**-11, "float16": 2**-11, "bfloat16": 2**-8}
"""Unit roundoff by dtype."""
OPERATIONS = 8
"""Operators between two borders: a norm has 4, an MLP 5, attention 10."""
SAFETY = 2.0
"""For errors that are not independent, and for the amplification by norms and softmax."""


@dataclass(frozen=True)
class Rounding:
    """The rounding of two runs that are compared."""

    dtype: str
    """The coarsest dtype in which either computes."""
    terms: int
    """The longest sum of products."""

    def explains(self, borders: int) -> float:
        """The relative error that rounding explains behind so many ``borders``."""
        unit = UNIT[self.dtype]
        accumulated = min(unit, UNIT["float32"])
        return SAFETY * math.sqrt(OPERATIONS * borders) * (unit + accumulated * math.sqrt(self.terms))

    def __str__(self) -> str:
        return f"{self.dtype}, sums of up to {self.terms} products"


def coarsest(dtypes: Iterable[str]) -> str:
    """The dtype of ``dtypes`` that rounds most; float64 of those that do not round."""
    return max((each for each in dtypes if each in UNIT), key=UNIT.__getitem__, default="float64")


@dataclass
class Numbers:
    """The statistics of a tensor, or of a part of it; those of disjoint parts add up."""

    count: int = 0
    sum: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    largest: float = -math.inf

    def add(self, other: Numbers) -> None:
        """Add the statistics of another part."""
        self.count += other.count
        self.sum += other.sum
        self.squares += other.squares
        self.least, self.largest = min(self.least, other.least), max(self.largest, other.largest)

    def scaled(self, factor: float) -> Numbers:
        """The statistics of the tensor times ``factor``."""
        ends = sorted((self.least * factor, self.largest * factor)) if self.count else [self.least, self.largest]
        return Numbers(self.count, self.sum * factor, self.squares * factor**2, *ends)

    @property
    def rms(self) -> float:
        """The root of the mean square; 0 of no elements."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.sum) and math.isfinite(self.squares)


def least_error(a: Numbers, b: Numbers, floor: float = 0.0) -> float:
    """A lower bound of the relative error between two tensors, from statistics; inf where only one is finite.

    The larger of two shares: the difference of the means or of the roots of the mean squares, over the latter (the
    norm of the difference over the norm of one tensor is at least that, by Cauchy-Schwarz); and the difference of the
    extremes over the largest magnitude. ``floor``: the least divisor.
    """
    if not (a.is_finite and b.is_finite):
        return 0.0 if a.is_finite == b.is_finite else math.inf
    scale, count = max(a.rms, b.rms, floor), max(a.count, 1)
    if scale == 0:
        return 0.0
    ends = max(abs(each) for each in (a.least, a.largest, b.least, b.largest, floor))
    means = abs(a.sum / count - b.sum / count) / scale
    return max(means, abs(a.rms - b.rms) / scale, abs(a.least - b.least) / ends, abs(a.largest - b.largest) / ends)


def error_of(a: torch.Tensor, b: torch.Tensor, floor: float = 0.0) -> float:
    """The norm of the difference over the larger of both norms, in float64; inf where values are not finite in one."""
    x, y = a.double().flatten(), b.double().flatten()
    if not torch.equal(x.isfinite(), y.isfinite()):
        return math.inf
    keep = x.isfinite()
    x, y = x[keep], y[keep]
    scale = max(float(x.norm()), float(y.norm()), floor * math.sqrt(max(x.numel(), 1)))
    return float((x - y).norm()) / scale if scale else 0.0
