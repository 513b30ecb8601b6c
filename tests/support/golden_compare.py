"""Differences between two records of goldens."""

from __future__ import annotations

from collections import Counter

FIGURES = ("calls",)
"""Keys that are compared as figures: a change that must change nothing else may change them."""
WIDTH = 300
MOST = 10
"""Lines of a list."""


def differences(before: dict[str, dict], after: dict[str, dict]) -> list[str]:
    """A line for each thing that differs, by case and rank."""
    said = [f"{name}: only in one record" for name in before.keys() ^ after.keys()]
    for name in before.keys() & after.keys():
        for key in (before[name].keys() | after[name].keys()) - set(FIGURES):
            one, other = before[name].get(key), after[name].get(key)
            if one != other:
                said.append(f"{name}: {key}: {_difference(one, other)}")
    return sorted(said)


def _difference(one: object, other: object) -> str:
    """The first difference of two lists, or what differs of two tables; else both."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
        return f"{len(keys)} differ, first {keys[0]}: {_difference(one.get(keys[0]), other.get(keys[0]))}"
    if not (isinstance(one, list) and isinstance(other, list)):
        return f"{str(one)[:WIDTH]} became {str(other)[:WIDTH]}"
    pairs = zip([*one, None], [*other, None], strict=False)
    first = next(index for index, (mine, its) in enumerate(pairs) if mine != its)
    moved = Counter(map(str, one)) == Counter(map(str, other))
    order = "the same in another order, " if moved else ""
    mine, its = (str(each[first : first + 2])[:WIDTH] for each in (one, other))
    return f"{order}{len(one)} became {len(other)}, the first that differs is number {first}: {mine} became {its}"


def calls_of_steps(before: dict[str, dict], after: dict[str, dict]) -> str:
    """How many Python calls the counted steps of all cases take in both records, and where that changed most."""
    names = [name for name in before if before[name].get("calls") and after.get(name, {}).get("calls")]
    changed = [name for name in names if before[name]["calls"] != after[name]["calls"]]
    lines = [f"Python calls of the steps of {len(names)} ranks, of which {len(changed)} changed:"]
    for kind in ("ds_npu", "total"):
        one, other = (sum(each[name]["calls"][kind] for name in names) for each in (before, after))
        lines.append(f"{kind}: {one:,} became {other:,}")
    change: Counter[str] = Counter()
    for name in changed:
        change.update(after[name]["calls"]["sources"])
        change.subtract(before[name]["calls"]["sources"])
    most = sorted((source for source in change if change[source]), key=lambda source: -abs(change[source]))
    lines += [f"{source}: {change[source]:+,}" for source in most[:MOST]]
    lines += changed[:MOST]
    return "\n  ".join(lines)
