"""``ds_npu accept``: try all of ds_npu on the NPUs of this machine, and write one file to send back."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ds_npu.acceptance.case import GROUP_NAMES
from ds_npu.acceptance.machine import npus_here
from ds_npu.cli.command import Command, cli_module, refused


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
    if arguments.out.exists() and not arguments.resume:
        return refused("accept", f"{arguments.out} is there already: --resume continues it, --out names another file")
    # Another process asks before this one imports torch, so that a missing NPU is reported once, below.
    npus = npus_here()
    if not npus.names:
        trial = "To see what this command does, on simulated NPUs: ds_npu sim -- ds_npu accept"
        return refused("accept", f"no NPU to try: {npus.why_none} {trial}")
    return int(cli_module("acceptance_run").run_acceptance(arguments, npus))


COMMAND = Command("accept", "try all of ds_npu on this machine's NPUs, in an hour at most", _add_arguments, _run)
