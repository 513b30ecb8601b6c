"""Chunk sizes of the loss, as options of a plan: fewer tokens at a time need less memory, and more time.

Pure: neither torch nor DeepSpeed. A chunk multiplies by the head's weight three times (logits, gradients of the hidden
states and of the weight); each product takes as long as its operations, or as it moves the weight and the chunk,
whichever is longer. So small chunks are bound by reading the weight once for each.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_npu.planner.memory_plan import Option
from ds_npu.topology.machine import Machine

LEAST_TOKENS = 256
"""Least tokens of a chunk: below it, products wait for the weight."""
PASSES = 8
"""Operators of a chunk's loss that read and write all of its logits (``ds_npu.parallel.tensor.chunked_loss``)."""


@dataclass(frozen=True)
class ChunkedHead:
    """One call of a loss with its head, on one rank."""

    tokens: int
    hidden: int
    words: int
    """This rank's part of the vocabulary."""
    itemsize: int
    """Bytes of a number of the products."""
    wide: int
    """Bytes of a number of the sums: of the loss, and of the weight's gradient."""
    copies: int = 1
    """Copies of the logits, in both dtypes: 2 where the model changes them after its head (softcapping)."""
    trains_weight: bool = True

    @property
    def bytes_of_token(self) -> int:
        """Bytes that a token needs while its chunk is computed."""
        return self.copies * self.words * (self.wide + self.itemsize) + 2 * self.hidden * self.itemsize

    def chunk_sizes(self) -> tuple[int, ...]:
        """Powers of two; the last holds all tokens."""
        sizes = [LEAST_TOKENS]
        while sizes[-1] < self.tokens:
            sizes.append(2 * sizes[-1])
        return tuple(sizes)

    def seconds(self, size: int, machine: Machine) -> float:
        """Estimate all chunks of ``size`` tokens."""
        whole, rest = divmod(self.tokens, size)
        return whole * self._chunk_seconds(size, machine) + (self._chunk_seconds(rest, machine) if rest else 0.0)

    def _chunk_seconds(self, tokens: int, machine: Machine) -> float:
        chunk = tokens * (self.hidden + self.words) * self.itemsize
        weight = self.hidden * self.words
        # The weight is read twice, the sum of its gradient read and written.
        products = [
            ((tokens, self.words, self.hidden), chunk + weight * self.itemsize),
            ((tokens, self.hidden, self.words), chunk + weight * self.itemsize),
            ((self.words, self.hidden, tokens), chunk + 2 * weight * self.wide),
        ][: 2 + self.trains_weight]
        passes = PASSES * machine.operator_seconds(0.0, 2 * tokens * self.words * self.wide)
        return passes + sum(
            machine.operator_seconds(machine.product_seconds(*sizes, self.itemsize), moved) for sizes, moved in products
        )

    def options(self, machine: Machine) -> tuple[Option, ...]:
        """An option for each size of chunks, the smallest first; its ``parts`` are the number of tokens."""
        sizes = self.chunk_sizes()
        least = min(self.seconds(size, machine) for size in sizes)
        return tuple(
            Option((str(size),), min(size, self.tokens) * self.bytes_of_token, self.seconds(size, machine) - least)
            for size in sizes
        )
