"""Losses and gradient norms of two logs, step by step, and the step from which they part.

A log is a Trainer's ``trainer_state.json``, JSON lines, a CSV file with a header (DeepSpeed's csv_monitor), or text
with ``step``, ``loss`` and ``grad_norm`` in each line.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NAMES = {
    "loss": ("loss", "train_loss", "lm_loss", "lm loss", "train/loss", "train/samples/train_loss"),
    "grad_norm": ("grad_norm", "gradient_norm", "grad norm", "norm", "train/grad_norm"),
}
"""The names of both curves in logs, in lower case."""
STEPS = ("step", "steps", "iteration", "iter", "global_step", "global_steps")
NUMBER = r"(-?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
TEXT = {
    "step": re.compile(rf"\b(?:{'|'.join(STEPS)})\b\W{{0,12}}(\d+)", re.IGNORECASE),
    "loss": re.compile(rf"\b(?:lm[ _])?loss\b['\"]?\s*[:=]?\s*{NUMBER}", re.IGNORECASE),
    "grad_norm": re.compile(rf"\b(?:grad(?:ient)?[ _])?norm\b['\"]?\s*[:=]?\s*{NUMBER}", re.IGNORECASE),
}
BEFORE = 20
"""The number of first steps whose differences count as the usual noise."""
FACTOR, IN_A_ROW = 8.0, 3
"""Curves part where IN_A_ROW steps in a row are further apart than FACTOR times the noise."""
Curve = dict[int, float]


class CurveError(ValueError):
    """A log in which no curve is found."""


@dataclass(frozen=True)
class Parting:
    """Two curves of one name, and where they part."""

    name: str
    steps: int
    """Steps that both have."""
    noise: float
    """The median relative difference of the first steps."""
    worst: tuple[int, float]
    """The step with the largest relative difference, and that difference."""
    parts_at: int | None

    def __str__(self) -> str:
        text = f"{self.name}: {self.steps} steps in both, apart by {self.noise:.1e} in the median of the first"
        if self.parts_at is None:
            return f"{text}; they do not part (at most {self.worst[1]:.1e}, at step {self.worst[0]})"
        return f"{text}; they part from step {self.parts_at} on (at most {self.worst[1]:.1e}, at step {self.worst[0]})"


def curves_of(path: Path) -> dict[str, Curve]:
    """Loss and gradient norm by step in the log at ``path``; raises CurveError where there is neither."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CurveError(f"{path}: it cannot be read ({error})") from error
    found: dict[str, Curve] = {}
    for step, values in _entries(text, path.suffix):
        for name, value in values.items():
            found.setdefault(name, {})[step] = value
    if not found:
        raise CurveError(
            f"{path}: found no steps with a loss or a grad_norm. Accepted are trainer_state.json, JSON lines, CSV with "
            "a header, and text with step, loss and grad_norm in a line"
        )
    return found


def _entries(text: str, suffix: str) -> Iterator[tuple[int, dict[str, float]]]:
    rows: list[object] | None = None
    if suffix in (".json", ".jsonl"):
        rows = _json_rows(text)
    elif suffix == ".csv":
        rows = [*csv.DictReader(text.splitlines(), skipinitialspace=True)]
    for row in rows or ():
        if isinstance(row, Mapping) and (entry := _entry(row)) is not None:
            yield entry
    for line in text.splitlines() if rows is None else ():
        step = TEXT["step"].search(line)
        values = {name: TEXT[name].search(line) for name in NAMES}
        own = {name: float(each[1]) for name, each in values.items() if each is not None}
        if step is not None and own:
            yield int(step[1]), own


def _json_rows(text: str) -> list[object]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        rows: list[object] = []
        for line in text.splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows
    if isinstance(found, dict):
        history = found.get("log_history", [found])
        return list(history) if isinstance(history, list) else []
    return found if isinstance(found, list) else []


def _entry(row: Mapping[str, object]) -> tuple[int, dict[str, float]] | None:
    lower = {str(key).strip().lower(): value for key, value in row.items()}
    step = next((_number(lower[name]) for name in STEPS if name in lower), None)
    values = {}
    for name, names in NAMES.items():
        value = next((_number(lower[each]) for each in names if each in lower), None)
        if value is not None:
            values[name] = value
    return None if step is None or not values else (int(step), values)


def _number(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None


def partings(a: Mapping[str, Curve], b: Mapping[str, Curve]) -> list[Parting]:
    """Where the curves that both have part; raises CurveError where they have no step in common."""
    found = [parting(name, a[name], b[name]) for name in NAMES if name in a and name in b]
    if not any(each.steps for each in found):
        raise CurveError("both logs have no step in common with a loss or a grad_norm in both")
    return [each for each in found if each.steps]


def parting(name: str, a: Curve, b: Curve) -> Parting:
    """Where two curves part: from a step on they are further apart than the noise at the beginning."""
    steps = sorted(a.keys() & b.keys())
    apart = [_difference(a[step], b[step]) for step in steps]
    noise = statistics.median([each for each in apart[:BEFORE] if math.isfinite(each)] or [0.0])
    most = max(range(len(steps)), key=apart.__getitem__, default=None)
    worst = (0, 0.0) if most is None else (steps[most], apart[most])
    return Parting(name, len(steps), noise, worst, _first_run(steps, apart, noise))


def _first_run(steps: Sequence[int], apart: Sequence[float], noise: float) -> int | None:
    """The first step of those that begin a run, IN_A_ROW long or up to the end, above the noise."""
    least = FACTOR * max(noise, 1e-12)
    for index, step in enumerate(steps):
        run = apart[index : index + IN_A_ROW]
        if min(run) > least:
            return step
    return None


def _difference(x: float, y: float) -> float:
    if not (math.isfinite(x) and math.isfinite(y)):
        return 0.0 if math.isnan(x) == math.isnan(y) and (x == y or math.isnan(x)) else math.inf
    scale = max(abs(x), abs(y))
    return abs(x - y) / scale if scale else 0.0
