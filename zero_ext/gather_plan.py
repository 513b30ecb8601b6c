"""When ZeRO 3 gathers which weights: messages, and what stays gathered between two uses, from a recorded micro-batch.

DeepSpeed gathers about one weight a message, as modules ask for them. Here a message holds weights that are used one
after the other, and is sent when the second message before it is first used: while weights are computed with, those of
the next message travel, and the message behind it waits for the links. Positions count the modules that fetch weights,
in the order of a forward and its backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

LEAST, MOST, SHARE = 20_000_000, 250_000_000, 32
"""Elements of a message where the config names none: this part of the model, about a layer, between these bounds."""
AHEAD = 2
"""Messages in flight at one time."""


class Use(NamedTuple):
    """A module, or modules one inside of the other, compute with a weight."""

    weight: int
    first: int
    """The position of the module that fetches it first."""
    last: int
    """The last position that is fetched before it is released."""


@dataclass(frozen=True)
class Limits:
    """Elements of whole weights."""

    message: int
    """Of one message."""
    gathered: int
    """That are gathered at one time, where a message is sent ahead (``stage3_max_live_parameters``)."""
    reuse: int
    """That are fetched between two uses of a weight which stays gathered (``stage3_max_reuse_distance``)."""


class Message(NamedTuple):
    """Weights that are gathered together."""

    sent: int
    """The position behind whose fetch it is sent; -1: before the first."""
    needed: int
    """The position of its first use."""
    weights: tuple[int, ...]


@dataclass(frozen=True)
class GatherPlan:
    """The messages of one micro-batch, in order, and when weights stay gathered."""

    messages: tuple[Message, ...]
    uses: Mapping[int, tuple[tuple[int, bool], ...]]
    """For each weight the first position of each use, and whether it is still gathered from the one before."""
    window: frozenset[int]
    """Weights that stay gathered until the optimizer step."""

    def stays(self, weight: int, position: int) -> bool:
        """Whether a weight whose use has ended before ``position`` is fetched stays gathered."""
        uses = self.uses.get(weight, ())
        following = bisect_left(uses, (position, False))
        return weight in self.window or (following < len(uses) and uses[following][1])

    def sent_behind(self) -> Mapping[int, tuple[Message, ...]]:
        """The messages by the position behind which they are sent."""
        return {sent: tuple(each) for sent, each in groupby(self.messages, lambda message: message.sent)}


def message_elements(model: int) -> int:
    """The elements of a message for a model of ``model`` elements, where the config names none."""
    return min(max(model // SHARE, LEAST), MOST)


def plan_gathers(
    uses: Sequence[Use], sizes: Mapping[int, int], limits: Limits, window: Collection[int] = ()
) -> GatherPlan:
    """The plan for the ``uses`` of weights of ``sizes`` elements.

    ``uses``: ordered by their first positions, those of one weight apart from each other. ``window``: the weights that
    are to stay gathered until the optimizer step; they have messages of their own.
    """
    fetched = _before(((use.first + 1, sizes[use.weight]) for use in uses), _positions(uses))
    ends: dict[int, int] = {}
    by_weight: dict[int, list[tuple[int, bool]]] = {}
    changes: list[tuple[int, int]] = []
    drafts: list[list[Use]] = []
    for use in uses:
        weight, size, end = use.weight, sizes[use.weight], ends.get(use.weight)
        is_kept = end is not None and (
            weight in window or fetched[use.first] - fetched[end + 1] < limits.reuse or not _is_over(end, drafts)
        )
        if weight not in window:
            gathered_from = end + 1 if is_kept and end is not None else use.first
            changes += (gathered_from, size), (use.last + 1, -size)
        ends[weight] = use.last
        by_weight.setdefault(weight, []).append((use.first, is_kept))
        if is_kept:
            continue
        joins = bool(drafts) and (drafts[-1][0].weight in window) == (weight in window)
        joins = joins and sum(sizes[each.weight] for each in drafts[-1]) + size <= limits.message
        if joins and (end is None or _is_over(end, drafts[:-1])):
            drafts[-1].append(use)
        else:
            drafts.append([use])
    gathered = _before(changes, _positions(uses))
    messages = tuple(_messages(drafts, sizes, gathered, limits.gathered))
    return GatherPlan(messages, {weight: tuple(each) for weight, each in by_weight.items()}, frozenset(window))


def _is_over(end: int, drafts: Sequence[Sequence[Use]]) -> bool:
    """Whether a use that ends at ``end`` is over before the message behind ``drafts`` may be sent."""
    return len(drafts) >= AHEAD and end + 1 < drafts[-AHEAD][0].first


def _positions(uses: Sequence[Use]) -> int:
    return max((use.last for use in uses), default=-1) + 1


def _before(changes: Iterable[tuple[int, int]], positions: int) -> list[int]:
    """For each position the sum of the changes at it and before it."""
    at = [0] * (positions + 2)
    for position, change in changes:
        at[position] += change
    return list(accumulate(at))


def _messages(
    drafts: Sequence[Sequence[Use]], sizes: Mapping[int, int], gathered: list[int], most: int
) -> Iterator[Message]:
    """Send each as early as ``most`` gathered elements allow, not before the first use of the AHEAD-th before it."""
    firsts = [-1] * AHEAD + [draft[0].first for draft in drafts]
    for draft, earliest in zip(drafts, firsts, strict=False):
        needed, weights = draft[0].first, tuple(use.weight for use in draft)
        size = sum(sizes[weight] for weight in weights)
        sent = needed - 1
        while sent > earliest and gathered[sent - 1] + size <= most and gathered[sent] + size <= most:
            sent -= 1
        for position in range(sent, needed):
            gathered[position] += size
        yield Message(sent, needed, weights)
