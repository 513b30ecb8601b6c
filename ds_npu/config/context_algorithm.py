"""How the ranks along the context axis share attention: cp = ulysses * ring, Ulysses ranks next to each other.

This is arithmetic only: no process group and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KvCache = Literal["none", "half", "full"]
AlgorithmName = Literal["ulysses", "ring", "hybrid", "allgather"]


@dataclass(frozen=True)
class ContextAlgorithm:
    """The context axis of ``ulysses * ring`` ranks.

    The ``ulysses`` ranks of a group exchange heads for tokens. The ``ring`` groups pass keys and values around, in
    inner rings of ``window`` ranks that form an outer ring (1 or ``ring``: a single ring), or ``gather`` them.
    ``kv_cache`` says what backward keeps of the keys and values that forward received: nothing, the keys or both.
    Raises ValueError where the sizes do not go together.
    """

    ulysses: int = 1
    ring: int = 1
    window: int = 1
    gather: bool = False
    kv_cache: KvCache = "none"

    def __post_init__(self) -> None:
        if min(self.ulysses, self.ring, self.window) < 1 or self.ring % self.window:
            raise ValueError(f"{self}: sizes are 1 or more, and window divides ring")
        if self.gather and self.window > 1:
            raise ValueError(f"{self}: what is gathered goes through no inner ring; window must be 1")

    @property
    def size(self) -> int:
        """Context ranks."""
        return self.ulysses * self.ring

    @property
    def inner(self) -> int:
        """Ranks of the innermost ring."""
        return self.ring if self.window == 1 else self.window

    @property
    def name(self) -> str:
        """The name in ``ds_npu.context_parallel.algorithm``; a single rank is "ulysses"."""
        if self.ring == 1:
            return "ulysses"
        return "hybrid" if self.ulysses > 1 else "allgather" if self.gather else "ring"

    @property
    def fewest_tokens(self) -> int:
        """Fewest tokens of a sequence that give each rank some (in a ring, from its first and its second half)."""
        return self.size if self.ring == 1 else 2 * self.size

    def ring_and_inner_rank(self, rank: int) -> tuple[int, int]:
        """(rank along the ring, rank within its Ulysses group) of context rank ``rank``."""
        return divmod(rank, self.ulysses)


def algorithm_of(
    name: AlgorithmName, context: int, ulysses: int | None = None, window: int = 1, kv_cache: KvCache | None = None
) -> ContextAlgorithm:
    """The algorithm ``name`` for ``context`` ranks; ``ulysses`` is for the hybrid.

    Without ``kv_cache``, keys and values that Ulysses exchanged are kept, those that a ring passed or gathered are not.
    """
    inside = {"ulysses": context, "hybrid": ulysses or 1}.get(name, 1)
    kept: KvCache = kv_cache or ("full" if name == "ulysses" else "none")
    return ContextAlgorithm(inside, context // inside, window, name == "allgather", kept)
