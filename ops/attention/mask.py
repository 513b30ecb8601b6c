"""Attention masks as data: bands and packed documents need no memory, whatever the length."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch


class Band(NamedTuple):
    """Row i sees the keys from i + ``low`` to i + ``high``; None: no bound."""

    low: int | None
    high: int | None

    def within(self, rows: int, keys: int) -> Band:
        """This band without the bounds that hide none of ``keys`` from any of ``rows``."""
        low = None if self.low is None or rows - 1 + self.low <= 0 else self.low
        return Band(low, None if self.high is None or self.high >= keys - 1 else self.high)

    def keys_of(self, rows: range, keys: int) -> range:
        """The keys that any of ``rows`` sees, of ``keys`` in all."""
        first = 0 if self.low is None else min(max(rows.start + self.low, 0), keys)
        past = keys if self.high is None else min(max(rows.stop + self.high, 0), keys)
        return range(first, max(first, past))

    def hidden(self, rows: range, keys: range, device: torch.device) -> torch.Tensor | None:
        """[rows, keys], True where the row does not see the key; None if every row sees every key."""
        # Key j minus row i, of which the band is a range.
        distance = torch.arange(keys.start, keys.stop, device=device)
        distance = distance - torch.arange(rows.start, rows.stop, device=device)[:, None]
        outside = []
        if self.high is not None and rows.start + self.high < keys.stop - 1:
            outside.append(distance > self.high)
        if self.low is not None and rows.stop - 1 + self.low > keys.start:
            outside.append(distance < self.low)
        return functools.reduce(torch.logical_or, outside) if outside else None

    def leaves_a_row_empty(self, rows: int, keys: int) -> bool:
        """Whether one of ``rows`` sees none of ``keys``."""
        if rows == 0:
            return False
        first_sees_none = self.high is not None and self.high < 0
        last_sees_none = self.low is not None and rows - 1 + self.low > keys - 1
        return keys == 0 or first_sees_none or last_sees_none


class Document(NamedTuple):
    """The rows and keys of one document in the packed tensors."""

    rows: range
    keys: range


@dataclass(frozen=True, eq=False)
class Mask:
    """Row i of R rows sees key j of K keys if i + c - before <= j <= i + c + after, where c = K - R, the lower right
    corner, or c = 0 with ``from_start``; None is no bound.

    ``ends_q`` and ``ends_k`` (layout TND) say where each packed document ends, counted from the tensor's beginning:
    cumulative lengths without the leading 0, on the host, for that is where the NPU's kernel takes them. A document
    sees itself only, and the band counts in each.
    ``dense`` stands alone: boolean, broadcastable to [B, N, Sq, Sk], True hides. Raises ValueError for what does not go
    together.
    """

    before: int | None = None
    after: int | None = None
    from_start: bool = False
    ends_q: tuple[int, ...] = ()
    ends_k: tuple[int, ...] = ()
    dense: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.dense is not None and (self.before, self.after, self.ends_q, self.ends_k) != (None, None, (), ()):
            raise ValueError("a dense mask stands alone: put the band and the documents into it")
        if self.dense is not None and self.dense.dtype != torch.bool:
            raise ValueError(f"a dense mask is boolean, True where a key is hidden, not {self.dense.dtype}")
        if self.before is not None and self.after is not None and self.before + self.after < 0:
            raise ValueError(f"a band of before={self.before} and after={self.after} holds no key")
        if len(self.ends_q) != len(self.ends_k):
            raise ValueError(f"{len(self.ends_q)} documents of rows and {len(self.ends_k)} of keys: must be as many")
        for name, ends in (("ends_q", self.ends_q), ("ends_k", self.ends_k)):
            if any(one > other for one, other in pairwise((0, *ends))):
                raise ValueError(f"{name} are cumulative lengths, which do not fall: {ends}")

    def band(self, rows: int, keys: int) -> Band:
        """The band of a sequence or document of this size."""
        corner = 0 if self.from_start else keys - rows
        low = None if self.before is None else corner - self.before
        return Band(low, None if self.after is None else corner + self.after)

    def documents(self, rows: int, keys: int) -> Iterator[Document]:
        """The packed documents; without any, one document of all ``rows`` and ``keys``."""
        ends_q = self.ends_q or (rows,)
        ends_k = self.ends_k or (keys,)
        for (q_begin, q_end), (k_begin, k_end) in zip(pairwise((0, *ends_q)), pairwise((0, *ends_k)), strict=True):
            yield Document(range(q_begin, q_end), range(k_begin, k_end))

    def packed(self, ends_q: Sequence[int], ends_k: Sequence[int] | None = None) -> Mask:
        """This band in each of the documents that end there; without ``ends_k`` keys end where rows do."""
        return replace(self, ends_q=tuple(ends_q), ends_k=tuple(ends_q if ends_k is None else ends_k))


FULL = Mask()
CAUSAL = Mask(after=0)


def sliding(window: int) -> Mask:
    """A causal mask in which each row sees ``window`` keys, its own included."""
    if window < 1:
        raise ValueError(f"a window of {window} keys: at least 1 is needed")
    return Mask(before=window - 1, after=0)
