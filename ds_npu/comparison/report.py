"""The comparison of two dumps as lines for people: the answer first, then a table of errors by depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_npu.comparison.compared_steps import KINDS, Comparison, Row
from ds_npu.dump_hooks import GRADIENT_OF_OUTPUT, OUTPUT, WEIGHT
from ds_npu.log import aligned

SHOWN = 12
"""Rows of the table, and copies, that are shown without being asked for all."""


def answer(comparison: Comparison) -> Iterator[str]:
    """The finding in a few lines: what differs first, in the order of execution, and by how much."""
    yield from comparison.copies[:SHOWN]
    if len(comparison.copies) > SHOWN:
        yield f"and {len(comparison.copies) - SHOWN} more tensors of which copies differ"
    weights = [row for row in comparison.off if row.kind == WEIGHT]
    first = comparison.first_off()
    if not comparison.rows:
        yield "nothing could be compared"
    elif first is None:
        yield f"nothing is further off than rounding explains, of {len(comparison.rows)} tensors"
    elif first.kind == WEIGHT:
        step = [row for row in weights if row.step == first.step]
        more = f", and {len(step) - 1} more of them" if len(step) > 1 else ""
        yield f"step {first.step}: the weight {first.name} differs{_by(first)}{more}"
        output = next((row for row in comparison.off if row.kind != WEIGHT and row.step == first.step), None)
        if output is not None:
            yield f"step {first.step}: outputs part at {output}: {_numbers(output)}"
    else:
        yield f"step {first.step}: {first} is the first that is further off than rounding explains: {_numbers(first)}"
        if first.kind == GRADIENT_OF_OUTPUT:
            yield "all outputs agree: the loss, or the backward of what stands behind this module, is another one"


def _by(row: Row) -> str:
    where = f" in {row.detail}" if row.detail else ""
    return f"{where}, by {row.error:.1e} of its norm" if row.explained else f"{where} in its bits, by {row.error:.1e}"


def _numbers(row: Row) -> str:
    detail = f" ({row.detail})" if row.detail else ""
    return f"error {row.error:.1e}, rounding explains {row.explained:.1e}{detail}"


def counts_by_kind(comparison: Comparison, every: bool = False) -> Iterator[str]:
    """For each step and kind, how many tensors were compared, and the error that most exceeds what rounding explains.

    ``every``: also of steps behind the first finding.
    """
    first = comparison.first_off()
    last = None if first is None or every else first.step
    for step in sorted({row.step for row in comparison.rows if last is None or row.step <= last}):
        for kind in KINDS:
            rows = [row for row in comparison.rows if (row.step, row.kind) == (step, kind)]
            if not rows:
                continue
            worst = max(rows, key=lambda row: row.error / row.explained if row.explained else row.error)
            off = sum(row.is_off for row in rows)
            text = f"step {step}: {len(rows)} {kind}s, {off} further off than rounding explains"
            if worst.error == 0:
                yield f"step {step}: {len(rows)} {kind}s, equal to the bit" if kind == WEIGHT else f"{text}, all equal"
            else:
                yield f"{text}; the most: {worst.name}, {_numbers(worst)}"


def error_table(comparison: Comparison, every: bool) -> Iterator[str]:
    """Errors of outputs by depth, of the step of the first finding; ``every``: of all tensors and steps."""
    rows: Sequence[Row] = comparison.rows
    if not every:
        first = comparison.first_off()
        step = first.step if first is not None else None
        rows = [row for row in rows if row.kind == OUTPUT and step in (None, row.step)]
        at = next((index for index, row in enumerate(rows) if row.is_off), 0)
        start = max(min(at - SHOWN // 2, len(rows) - SHOWN), 0)
        rows = rows[start : start + SHOWN] if first is not None else []
    if rows:
        head = ("step", "tensor", "of", "error", "rounding explains", "")
        cells = [
            (f"{row.step}", row.kind, row.name, f"{row.error:.1e}", f"{row.explained:.1e}", "<--" if row.is_off else "")
            for row in rows
        ]
        yield from aligned([head, *cells])
