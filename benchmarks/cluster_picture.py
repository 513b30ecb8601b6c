"""A table and a picture of the cases that ``cluster.py --json`` has written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ds_npu.svg import drawing, rect, text

SIDES = {"ds_npu": "#2a9d8f", "DeepSpeed": "#adb5bd"}
NAMES, SCALE, BAR, GAP, MARGIN = 190, 8.0, 16, 14, 24
"""Pixels: names of cases, a per cent of MFU, a bar, between cases, around all."""


def rate(row: dict[str, Any] | None) -> float:
    """Tokens a second and NPU of a layout; 0 where there is none, where it does not fit, or where it failed."""
    figures = row.get("figures") if row is not None else None
    return float(figures["tokens_per_second_and_npu"]) if figures is not None and figures["fits"] else 0.0


def best(case: dict[str, Any], side: str) -> dict[str, Any] | None:
    """The fastest row of ``side`` that fits; None where there is none."""
    return max((row for row in case["rows"] if row["side"] == side and rate(row)), key=rate, default=None)


def ratio(case: dict[str, Any]) -> str:
    """The best of ds_npu over the best of plain DeepSpeed."""
    ours, theirs = (rate(best(case, side)) for side in SIDES)
    return f"{ours / theirs:.2f}" if theirs else "-"


def table(cases: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table in Markdown, a row for each case."""
    yield "| case | NPUs | ds_npu: tokens/s a NPU (MFU), layout; what else takes time | plain DeepSpeed | ratio |"
    yield "|---|---|---|---|---|"
    for case in cases:
        cells = [_cell(best(case, side)) for side in SIDES]
        yield f"| {case['case']} | {case['npus']} | {cells[0]} | {cells[1]} | {ratio(case)} |"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "none fits"
    figures = row["figures"]
    rate = f"{figures['tokens_per_second_and_npu']:,.0f} ({figures['mfu']:.1%})"
    return f"{rate}, {row['layout']}; {row['holds back']}"


def picture(cases: Sequence[dict[str, Any]]) -> str:
    """An SVG file: of each case a bar of MFU for each side."""
    lines = [
        text(
            MARGIN,
            MARGIN + 6,
            "MFU of the best layout, ds_npu and plain DeepSpeed (simulated: ds_npu predict)",
            font_size=16,
            font_weight="bold",
        )
    ]
    y = 2 * MARGIN + 6
    for case in cases:
        lines.append(text(MARGIN, y + BAR + 4, f"{case['case']}, {case['npus']} NPUs"))
        for side, colour in SIDES.items():
            row = best(case, side)
            share = 0.0 if row is None else 100 * float(row["figures"]["mfu"])
            lines.append(rect(MARGIN + NAMES, y, SCALE * share, BAR, fill=colour))
            told = "no layout fits" if row is None else f"{share:.1f} %  {side}: {row['layout']}"
            lines.append(text(MARGIN + NAMES + SCALE * share + 6, y + BAR - 4, told, fill="#555"))
            y += BAR
        y += GAP
    return drawing(MARGIN + NAMES + round(SCALE * 75) + 330, y + MARGIN, lines, font_size=12)
