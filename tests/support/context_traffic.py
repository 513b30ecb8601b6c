"""What each algorithm of context parallelism has to send, from its definition: bytes to each other rank.

Letters: n ring ranks, w of them in an inner ring, u Ulysses ranks; a block is the keys and values of a ring rank.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ds_npu.config.context_algorithm import ContextAlgorithm

Leaving = Counter[tuple[str, int]]
"""Bytes by kind of message (as ``wire.Wire.leaving``; tag 1 are keys and values, 2 gradients) and context rank."""

BLOCKS, SUMS = "send 1", "send 2"


@dataclass(frozen=True)
class Traffic:
    """One attention: the tokens of each context rank (of all samples), heads, widths, and bytes of a number.

    ``last``: the number of steps of a single ring after the first, where a window ends it early.
    """

    algorithm: ContextAlgorithm
    counts: tuple[int, ...]
    heads: int
    key_heads: int
    width: int
    value_width: int
    number: int
    last: int | None = None

    @property
    def summed(self) -> int:
        """Bytes of a number of a sum of gradients: float32, or float64 for float64."""
        return max(self.number, 4)

    def queries(self, inside: int) -> range:
        """The query heads of a Ulysses rank: all heads in order, the first ranks with one more."""
        share, more = divmod(self.heads, self.algorithm.ulysses)
        begin = inside * share + min(inside, more)
        return range(begin, begin + share + (inside < more))

    def keys(self, inside: int) -> int:
        """How many key heads those use."""
        return len({head * self.key_heads // self.heads for head in self.queries(inside)})

    def key_numbers(self, widths: tuple[str, ...] = ("key", "value")) -> int:
        """Numbers of a key head and a value head of a token, or of one of them."""
        return sum({"key": self.width, "value": self.value_width}[each] for each in widths)

    def needed_again(self) -> int:
        """Of ``key_numbers`` what backward must receive again: what was not kept."""
        return self.key_numbers({"none": ("key", "value"), "half": ("value",), "full": ()}[self.algorithm.kv_cache])

    def block(self, ring_rank: int, inside: int) -> int:
        """Tokens of a ring rank (of its whole Ulysses group) times key heads of Ulysses rank ``inside``."""
        u = self.algorithm.ulysses
        return sum(self.counts[ring_rank * u : (ring_rank + 1) * u]) * self.keys(inside)


def forward(traffic: Traffic, rank: int) -> Leaving:
    """Blocks once around; before it the heads of q, k and v for those who compute them, behind it out's back."""
    found = _blocks(traffic, rank, traffic.key_numbers() * traffic.number)
    for peer, inside in _group(traffic, rank):
        mine, theirs = traffic.counts[rank], traffic.counts[peer]
        there = mine * (len(traffic.queries(inside)) * traffic.width + traffic.keys(inside) * traffic.key_numbers())
        back = theirs * len(traffic.queries(rank % traffic.algorithm.ulysses)) * traffic.value_width
        found["exchange", peer] += (there + back) * traffic.number
    return found


def backward(traffic: Traffic, rank: int) -> Leaving:
    """Of the blocks what was not kept, and the sums of their gradients; the heads of dout, and dq's, dk's, dv's back.

    Ulysses alone exchanges k and v again where it has not kept them; ahead of a ring it keeps what it has exchanged.
    """
    found = _blocks(traffic, rank, traffic.needed_again() * traffic.number)
    found += _sums(traffic, rank, traffic.key_numbers() * traffic.summed)
    own = rank % traffic.algorithm.ulysses
    for peer, inside in _group(traffic, rank):
        mine, theirs = traffic.counts[rank], traffic.counts[peer]
        there = mine * len(traffic.queries(inside)) * traffic.value_width
        if traffic.algorithm.ring == 1:
            there += mine * traffic.keys(inside) * traffic.needed_again()
        back = theirs * (len(traffic.queries(own)) * traffic.width + traffic.keys(own) * traffic.key_numbers())
        found["exchange", peer] += (there + back) * traffic.number
    return found


def _group(traffic: Traffic, rank: int) -> list[tuple[int, int]]:
    """The other ranks of the Ulysses group, and their places in it."""
    u = traffic.algorithm.ulysses
    return [(rank // u * u + inside, inside) for inside in range(u) if inside != rank % u]


def _blocks(traffic: Traffic, rank: int, size: int) -> Leaving:
    """Every rank must get all blocks but its own, n - 1.

    Single ring: each block goes from rank to rank, so a rank passes all on but that of the next one. A window ends that
    after ``last`` steps: its own and the last - 1 before it. Double ring: in round a it does so with the blocks of the
    inner ring a before it, w - 1 a round, and passes the first of each round but the last to the next inner ring:
    n / w - 1 over the outer link. Gathered: its own block to each other rank, which then gets (n - 1) / n of the whole;
    as long as the longest.
    """
    algorithm, n, u = traffic.algorithm, traffic.algorithm.ring, traffic.algorithm.ulysses
    place, inside = divmod(rank, u)
    blocks = [traffic.block(ring_rank, inside) * size for ring_rank in range(n)]
    found: Leaving = Counter()
    if algorithm.gather:
        found.update({("gather", other * u + inside): max(blocks) for other in range(n) if other != place})
        return found
    w, last = algorithm.inner, algorithm.inner - 1 if traffic.last is None else traffic.last
    ring, at = divmod(place, w)
    for a in range(n // w):
        first = (ring - a) % (n // w) * w
        passed = [blocks[first + (at - i) % w] for i in range(last)]
        found[BLOCKS, (ring * w + (at + 1) % w) * u + inside] += sum(passed)
        if a < n // w - 1:
            found[BLOCKS, (place + w) % n * u + inside] += blocks[first + at]
    return found


def _sums(traffic: Traffic, rank: int, size: int) -> Leaving:
    """The owner of a block must get the sum of n - 1 other ranks' gradients.

    In a ring each rank adds its own and passes the sum on: n - 1 messages a block, and a rank sends one for every block
    but its own. The last rank of a round sends it to the owner: its ring's next rank, but for the rounds of a double
    ring after the first, n / w - 1 over the outer link, and a ring that a window ends after ``last`` steps. Scattered:
    the sums of an other rank's block to it.
    """
    algorithm, n, u = traffic.algorithm, traffic.algorithm.ring, traffic.algorithm.ulysses
    place, inside = divmod(rank, u)
    blocks = [traffic.block(ring_rank, inside) * size for ring_rank in range(n)]
    found: Leaving = Counter()
    if algorithm.gather:
        found.update({("scatter", other * u + inside): max(blocks) for other in range(n) if other != place})
        return found
    w, last = algorithm.inner, algorithm.inner - 1 if traffic.last is None else traffic.last
    ring, at = divmod(place, w)
    for a in range(n // w):
        first = (ring - a) % (n // w) * w
        for i in range(a == 0, last + 1):
            owner = first + (at - i) % w
            to = owner if i == last else ring * w + (at + 1) % w
            found[SUMS, to * u + inside] += blocks[owner]
    return found
