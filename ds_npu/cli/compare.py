"""``ds_npu compare``: two runs of any layouts, devices or dtypes, and the first tensor that differs; or two logs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path

from ds_npu.cli.command import Command, refused
from ds_npu.comparison.compared_steps import compared
from ds_npu.comparison.curves import CurveError, curves_of, partings
from ds_npu.comparison.dump_reader import DumpedRun, DumpReadError
from ds_npu.comparison.picture import error_svg
from ds_npu.comparison.report import answer, counts_by_kind, error_table
from ds_npu.comparison.rounding import UNIT
from ds_npu.config.problems import printable


def _add_arguments(parser: ArgumentParser) -> None:
    what = "a folder that ds_npu.dump or dump_hooks.py wrote; or a log with losses and norms"
    parser.add_argument("a", type=Path, metavar="A", help=what)
    parser.add_argument("b", type=Path, metavar="B", help="the same of another run")
    parser.add_argument("--all", action="store_true", help="print the errors of all tensors")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture of the errors by depth")
    parser.add_argument(
        "--dtype", choices=UNIT, help="take the rounding of this dtype (float32 inside a float64 model, tf32 on a GPU)"
    )


def _run(arguments: Namespace) -> int:
    both = (arguments.a, arguments.b)
    missing = next((path for path in both if not path.exists()), None)
    if missing is not None:
        return refused("compare", f"{printable(str(missing))}: there is no such file or folder")
    if arguments.a.is_dir() != arguments.b.is_dir():
        return refused("compare", "one of A and B is a folder and one a file: give two dumps, or two logs")
    try:
        return _dumps(arguments) if arguments.a.is_dir() else _logs(*both)
    except (DumpReadError, CurveError) as error:
        return refused("compare", printable(str(error)))


def _dumps(arguments: Namespace) -> int:
    runs = DumpedRun(arguments.a), DumpedRun(arguments.b)
    if not runs[0].steps.keys() & runs[1].steps.keys():
        found = " and ".join(", ".join(map(str, sorted(run.steps))) or "none" for run in runs)
        return refused("compare", f"both runs have no step in common: found {found}")
    comparison = compared(*runs, arguments.dtype)
    described = [f"{letter}: {run}" for letter, run in zip("AB", runs, strict=True)]
    details = [f"  {line}" for line in (*counts_by_kind(comparison, arguments.all), *comparison.notes)]
    rows = list(error_table(comparison, arguments.all))
    _print((*answer(comparison), "", *described, *details, *([""] if rows else []), *rows))
    if arguments.svg is not None and comparison.rows:
        names = arguments.a.name, arguments.b.name
        arguments.svg.write_text(error_svg(comparison, names), encoding="utf-8")
    return 1 if comparison.off or comparison.copies else 0


def _logs(a: Path, b: Path) -> int:
    found = partings(curves_of(a), curves_of(b))
    _print(map(str, found))
    return 1 if any(each.parts_at is not None for each in found) else 0


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print("".join(each if each.isprintable() else ascii(each)[1:-1] for each in line))


PURPOSE = "find the first tensor in which two runs differ by more than rounding"
COMMAND = Command("compare", PURPOSE, _add_arguments, _run)
