"""How the ranks along the context axis share attention: cp = ulysses * ring, Ulysses ranks next to each other.

Arithmetic only, no process group and no torch.
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
    rings of ``window`` ranks within a ring of those (1 or ``ring``: a single ring), or, with ``gather``, gather them.
    ``kv_cache`` is what is kept for backward of the keys and values that were received in forward: nothing, the keys
    or both. Raises ValueError where the sizes do not go together.
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
        """As in ``ds_npu.context_parallel.algorithm``; a single rank is "ulysses"."""
        if self.ring == 1:
            return "ulysses"
        if self.ulysses > 1:
            return "hybrid"
        return "allgather" if self.gather else "ring"

    @property
    def fewest_tokens(self) -> int:
        """Tokens that a sequence must have, so that each rank gets some (in a ring, of the early and the late ones)."""
        return self.size if self.ring == 1 else 2 * self.size

    def place(self, rank: int) -> tuple[int, int]:
        """The rank along the ring and within its Ulysses group of context rank ``rank``."""
        return divmod(rank, self.ulysses)


def algorithm_of(
    name: AlgorithmName, context: int, ulysses: int | None = None, window: int = 1, kv_cache: KvCache | None = None
) -> ContextAlgorithm:
    """The algorithm of that name for ``context`` ranks, ``ulysses`` being the hybrid's.

    ``kv_cache`` left out: what Ulysses has exchanged is kept, what travels in a ring or is gathered is not.
    """
    inside = {"ulysses": context, "hybrid": ulysses or 1}.get(name, 1)
    kept: KvCache = kv_cache or ("full" if name == "ulysses" else "none")
    return ContextAlgorithm(inside, context // inside, window, name == "allgather", kept)
