"""FLOP of an optimizer step, and the shares of the machine's peak that they reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepFlop:
    """FLOP of products in one optimizer step of all ranks, and what the ranks could do."""

    model: float
    """FLOP of the model: without recomputation and masked pairs; what ranks replicate counts once."""
    executed: float
    """All FLOP."""
    six_nd: float | None
    """6 x parameters x tokens; None with experts, with frozen weights, or without tokens."""
    peak: float
    """FLOP/s of all ranks together."""

    def mfu(self, seconds: float) -> float:
        """The model's FLOP as a share of what the ranks could do in a step of ``seconds``."""
        return self.model / seconds / self.peak

    def hfu(self, seconds: float) -> float:
        """All executed FLOP as a share of what the ranks could do in a step of ``seconds``."""
        return self.executed / seconds / self.peak
