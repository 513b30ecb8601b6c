"""A table and a picture of what ``cluster.py --json`` has written.

python benchmarks/cluster_picture.py FILE.json... --svg docs/images/cluster.svg
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ds_npu.svg import drawing, rect, text

SIDES = {"ds_npu": "#2a9d8f", "DeepSpeed": "#adb5bd"}
NAMES, SCALE, BAR, GAP, MARGIN = 190, 8.0, 16, 14, 24
"""Pixels: names of cases, a per cent of MFU, a bar, between cases, around all."""


def best(case: dict[str, Any], side: str) -> dict[str, Any] | None:
    """The fastest row of ``side`` that fits; None where there is none."""
    rows = [row for row in case["rows"] if row["side"] == side and row.get("figures", {}).get("fits")]
    return max(rows, key=lambda row: float(row["figures"]["tokens_per_second_and_npu"]), default=None)


def table(cases: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table in Markdown, a row for each case."""
    yield "| case | NPUs | ds_npu: tokens/s a NPU (MFU), layout; beside computing | plain DeepSpeed | ratio |"
    yield "|---|---|---|---|---|"
    for case in cases:
        cells = [_cell(best(case, side)) for side in SIDES]
        ratio = "-" if case["ratio"] is None else f"{case['ratio']:.2f}"
        yield f"| {case['case']} | {case['npus']} | {cells[0]} | {cells[1]} | {ratio} |"


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
