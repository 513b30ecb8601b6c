"""Tables and lines that the reports of predicted and of profiled steps share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ds_npu.step_time.intervals import EXPOSED, WAITS, by_axes

SHOWN = 0.0005
"""The smallest part of a step that has a row."""


def flush_right(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table whose first column is flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = "".join(f"  {cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        yield f"  {first:<{widths[0]}}{cells}"


def activity_rows(
    ranks: Sequence[tuple[str, Mapping[str, float]]], shares: Mapping[str, float]
) -> Iterator[tuple[str, ...]]:
    """Rows of milliseconds of each activity on each rank, from seconds, and their ``shares`` of the step."""
    yield ("", *(name for name, _ in ranks), "of the step")
    for name, part in shares.items():
        if part >= SHOWN:
            yield (name, *(f"{1e3 * own.get(name, 0.0):,.1f}" for _, own in ranks), f"{part:.1%}")


def communication_answers(shares: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Exposed communication and waits for other ranks: their sums, and the parts of the axes."""
    for title, prefix in (("exposed communication", EXPOSED), ("waits for late ranks", WAITS)):
        found = by_axes(dict(shares), prefix)
        parts = ", ".join(f"{axes} {part:.1%}" for axes, part in found.items() if part >= SHOWN)
        yield title, f"{sum(found.values()):.1%}" + (f": {parts}" if parts else "")
