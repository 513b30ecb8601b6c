"""When ZeRO 3 gathers which weights, and which it keeps gathered between two uses, by a recorded micro-batch.

DeepSpeed gathers about one weight a message, as modules ask for them. Here a message holds weights that are used one
after the other, and is sent when the second message before it is first used: while weights are computed with, those of
the next message travel, and the message behind it waits for the links. Positions count the modules that fetch weights,
in the order of a forward and its backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import NamedTuple

LEAST, MOST, SHARE = 20_000_000, 250_000_000, 32
"""Elements of a message where the config names none: a SHARE-th of the model's, about a layer, from LEAST to MOST."""
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
    """Limits in elements of whole weights."""

    message: int
    """The most of one message."""
    gathered: int
    """The most that are gathered at one time, where a message is sent ahead (``stage3_max_live_parameters``)."""
    reuse: int
    """A weight is kept gathered if fewer are fetched before it is used again (``stage3_max_reuse_distance``)."""


class GatherMessage(NamedTuple):
    """Weights that are gathered together."""

    sent: int
    """The position behind whose fetch it is sent; -1: before the first."""
    needed: int
    """The position of its first use."""
    weights: tuple[int, ...]


@dataclass(frozen=True)
class GatherPlan:
    """The messages of one micro-batch, in order, and when weights are kept gathered."""

    messages: tuple[GatherMessage, ...]
    uses: Mapping[int, tuple[tuple[int, bool], ...]]
    """For each weight the first position of each use, and whether it is still gathered from the one before."""
    carried: frozenset[int]
    """Weights that are kept gathered from one micro-batch to the next, until the optimizer step."""

    def keeps(self, weight: int, position: int) -> bool:
        """Whether a weight whose use has ended before ``position`` is fetched is kept gathered."""
        uses = self.uses.get(weight, ())
        following = bisect_left(uses, (position, False))
        return uses[following][1] if following < len(uses) else weight in self.carried

    def sent_behind(self) -> Mapping[int, tuple[GatherMessage, ...]]:
        """The messages by the position behind which they are sent."""
        return {sent: tuple(each) for sent, each in groupby(self.messages, lambda message: message.sent)}


def message_elements(model: int) -> int:
    """The elements of a message for a model of ``model`` elements, where the config names none."""
    return min(max(model // SHARE, LEAST), MOST)


def plan_gathers(
    uses: Sequence[Use], sizes: Mapping[int, int], limits: Limits, kept: Collection[int] = ()
) -> GatherPlan:
    """The plan of all micro-batches like the recorded one, with ``uses`` of weights of ``sizes`` elements.

    ``uses``: ordered by their first positions; those of one weight do not overlap. ``kept``: weights that are
    kept gathered until the optimizer step whatever the limits are.
    """
    fetched = _before(((use.first + 1, sizes[use.weight]) for use in uses), uses)
    carried = frozenset(_carried(uses, fetched, limits.reuse)).union(kept)
    ends: dict[int, int] = {}
    by_weight: dict[int, list[tuple[int, bool]]] = {}
    drafts: list[list[Use]] = []
    for use in uses:
        weight, end = use.weight, ends.get(use.weight)
        is_kept = end is not None and (
            weight in kept or fetched[use.first] - fetched[end + 1] < limits.reuse or not _is_over(end, drafts)
        )
        by_weight.setdefault(weight, []).append((use.first, is_kept))
        ends[weight] = use.last
        if is_kept:
            continue
        joins = bool(drafts) and (drafts[-1][0].weight in carried) == (weight in carried)
        joins = joins and sum(sizes[each.weight] for each in drafts[-1]) + sizes[weight] <= limits.message
        if joins and (end is None or _is_over(end, drafts[:-1])):
            drafts[-1].append(use)
        else:
            drafts.append([use])
    plan = GatherPlan((), {weight: tuple(each) for weight, each in by_weight.items()}, carried)
    gathered = _before(_changes(uses, sizes, plan, kept), uses)
    return replace(plan, messages=tuple(_messages(drafts, sizes, gathered, limits.gathered)))


def _carried(uses: Sequence[Use], fetched: Sequence[int], reuse: int) -> Iterator[int]:
    """Weights that are used again, in the next micro-batch, before ``reuse`` elements have been fetched."""
    firsts = {use.weight: use.first for use in reversed(uses)}
    ends = {use.weight: use.last for use in uses}
    for weight, first in firsts.items():
        if fetched[-1] - fetched[ends[weight] + 1] + fetched[first] < reuse:
            yield weight


def _changes(
    uses: Sequence[Use], sizes: Mapping[int, int], plan: GatherPlan, kept: Collection[int]
) -> Iterator[tuple[int, int]]:
    """Positions, and the change in gathered elements at each.

    Not counted are ``kept`` weights, and that messages are sent ahead.
    """
    ends: dict[int, int] = {}
    for use in uses:
        weight, size, end = use.weight, sizes[use.weight], ends.get(use.weight)
        if weight in kept:
            continue
        if not (weight in plan.carried if end is None else plan.keeps(weight, end + 1)):
            yield use.first, size
        elif end is None:
            yield 0, size
        if not plan.keeps(weight, use.last + 1):
            yield use.last + 1, -size
        ends[weight] = use.last


def _is_over(end: int, drafts: Sequence[Sequence[Use]]) -> bool:
    """Whether a use that ends at ``end`` is over before the message behind ``drafts`` may be sent."""
    return len(drafts) >= AHEAD and end + 1 < drafts[-AHEAD][0].first


def _before(changes: Iterable[tuple[int, int]], uses: Sequence[Use]) -> list[int]:
    """For each position the sum of the changes at it and before it; for -1, the position before the first, of all."""
    at = [0] * (max((use.last for use in uses), default=-1) + 3)
    for position, change in changes:
        at[position] += change
    return list(accumulate(at))


def _messages(
    drafts: Sequence[Sequence[Use]], sizes: Mapping[int, int], gathered: list[int], most: int
) -> Iterator[GatherMessage]:
    """The messages in order, each sent as early as ``most`` gathered elements allow.

    None is sent before the first use of the message that is AHEAD before it.
    """
    firsts = [-1] * AHEAD + [draft[0].first for draft in drafts]
    before = -1
    for draft, earliest in zip(drafts, firsts, strict=False):
        needed = draft[0].first
        weights = tuple(use.weight for use in draft)
        size = sum(sizes[weight] for weight in weights)
        for use in draft:
            # The weight arrives with the message's first one, before its own use.
            for position in range(needed, use.first):
                gathered[position] += sizes[use.weight]
        sent = needed - 1
        while sent > max(earliest, before) and gathered[sent - 1] + size <= most and gathered[sent] + size <= most:
            sent -= 1
        for position in range(sent, needed):
            gathered[position] += size
        before = sent
        yield GatherMessage(sent, needed, weights)
