"""A table for people of the uses of the ranks' memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_npu.features.memory_report.memory_use import (
    ACTIVATIONS,
    BACKWARD,
    BETWEEN,
    GRADIENTS,
    OPTIMIZER,
    REST,
    WEIGHTS,
    MemoryUse,
)

MOST_RANKS, MOST_MODULES, LEAST_PART = 8, 10, 0.005
"""Most columns (ranks with the highest peaks), most rows of activations, and the least part of a peak with a row."""
BEFORE, BEHIND = (WEIGHTS, GRADIENTS, OPTIMIZER), (BACKWARD, BETWEEN, REST)
"""Rows before and behind those of activations."""
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
OTHER_ACTIVATIONS = f"{ACTIVATIONS}other modules"


def use_table(step: int, uses: Sequence[MemoryUse]) -> str:
    """A row for each use of memory, a column for each rank."""
    most = max(each.peak for each in uses)
    size, unit = next((each for each in UNITS if most >= 10 * each[0]), UNITS[-1])
    shown = sorted(sorted(uses, key=lambda each: -each.peak)[:MOST_RANKS], key=lambda each: each.rank)
    rows = [(f"memory at the peak of step {step}, in {unit}", [f"rank {each.rank}" for each in shown])]
    rows += [(name, [_number(value, size) for value in values]) for name, values in _rows(shown)]
    first = max(len(name) for name, _ in rows)
    width = max(9, *(len(cell) for _, cells in rows for cell in cells))
    lines = [f"{name:<{first}}" + "".join(f"  {cell:>{width}}" for cell in cells) for name, cells in rows]
    if len(uses) > len(shown):
        least = min(uses, key=lambda each: each.peak)
        lines.append(
            f"the {len(shown)} of {len(uses)} ranks with the highest peaks; the lowest: rank {least.rank}, "
            f"{_number(least.peak, size)}"
        )
    return "\n".join(lines)


def largest_activations(uses: Sequence[MemoryUse], most: int) -> list[str]:
    """The ``most`` largest activations at the peak of any of ``uses``, the largest first."""
    largest: dict[str, float] = {}
    for use in uses:
        for name, size in use.at_peak.items():
            if name.startswith(ACTIVATIONS) and size >= LEAST_PART * use.peak:
                largest[name] = max(size, largest.get(name, 0))
    return sorted(largest, key=lambda name: -largest[name])[:most]


def _rows(uses: Sequence[MemoryUse]) -> Iterator[tuple[str, list[int | None]]]:
    names = [*BEFORE, *largest_activations(uses, MOST_MODULES)]
    others = [each.peak - sum(each.at_peak.get(name, 0) for name in (*names, *BEHIND)) for each in uses]
    for name in names:
        yield name, [each.at_peak.get(name, 0) for each in uses]
    yield OTHER_ACTIVATIONS, list(others)
    for name in BEHIND:
        if any(name in each.at_peak for each in uses):
            yield name, [each.at_peak.get(name, 0) for each in uses]
    yield "= tensors", [each.peak for each in uses]
    if any(each.reserved is not None for each in uses):
        unused = [None if each.reserved is None else each.reserved - each.peak for each in uses]
        yield "fragments and spare memory of the allocator", unused
        yield "outside of the allocator: HCCL's buffers, the runtime", [each.outside for each in uses]


def _number(value: int | None, size: int) -> str:
    return "-" if value is None else f"{value / size:,.1f}"
