"""``ds_npu accept``: try all of ds_npu on the NPUs of this machine, and write one file to send back."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ds_npu.acceptance.case import GROUP_NAMES
from ds_npu.cli.command import Command, cli_module


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("ds_npu_accept.json"), metavar="FILE", help="the file to write"
    )
    parser.add_argument("--resume", action="store_true", help="continue FILE: run what has not passed")
    parser.add_argument(
        "--only", action="append", choices=GROUP_NAMES, metavar="GROUP", help=f"one of {', '.join(GROUP_NAMES)}"
    )
    parser.add_argument(
        "--cases",
        choices=("small", "all"),
        help="small: what takes a minute on simulated NPUs, where it is the default; all: sizes of real models, too",
    )


def _run(arguments: Namespace) -> int:
    code: int = cli_module("acceptance_run").run(arguments)
    return code


COMMAND = Command("accept", "try all of ds_npu on this machine's NPUs, in an hour at most", _add_arguments, _run)
