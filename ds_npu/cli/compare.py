"""``ds_npu compare``: two runs of any two layouts, devices or dtypes, and the first tensor that differs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ds_npu.cli.command import Command, refused
from ds_npu.comparison.compared_steps import compared
from ds_npu.comparison.dump_reader import DumpedRun, DumpReadError
from ds_npu.comparison.report import answer, summary, table
from ds_npu.comparison.rounding import UNIT
from ds_npu.config.problems import printable


def _add_arguments(parser: ArgumentParser) -> None:
    what = "a folder that ds_npu.dump or dump_hooks.py wrote"
    parser.add_argument("a", type=Path, metavar="A", help=what)
    parser.add_argument("b", type=Path, metavar="B", help="the same of another run")
    parser.add_argument("--all", action="store_true", help="print the errors of all tensors")
    parser.add_argument(
        "--dtype",
        choices=UNIT,
        help="take the rounding of this dtype (float32 inside a float64 model, tf32 on a GPU)",
    )


def _run(arguments: Namespace) -> int:
    try:
        runs = [DumpedRun(path) for path in (arguments.a, arguments.b)]
        if not runs[0].steps.keys() & runs[1].steps.keys():
            said = " and ".join(", ".join(map(str, sorted(run.steps))) or "none" for run in runs)
            return refused("compare", f"both runs have no step in common: found {said}")
        comparison = compared(runs[0], runs[1], arguments.dtype)
    except (OSError, DumpReadError) as error:
        return refused("compare", printable(str(error)))
    described = [f"{letter}: {run}" for letter, run in zip("AB", runs, strict=True)]
    details = [f"  {line}" for line in (*summary(comparison), *comparison.notes)]
    rows = list(table(comparison, arguments.all))
    for line in (*answer(comparison), "", *described, *details, *([""] if rows else []), *rows):
        print("".join(each if each.isprintable() else ascii(each)[1:-1] for each in line))
    return 1 if comparison.off or comparison.copies else 0


COMMAND = Command(
    "compare", "find the first tensor in which two runs differ by more than rounding", _add_arguments, _run
)
