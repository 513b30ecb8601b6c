"""The ``ds_npu`` command."""

from __future__ import annotations

import importlib
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from io import TextIOWrapper

from ds_npu.cli.command import Command, Parser

COMMANDS = ("check", "schema", "sim")
"""Each is ``COMMAND`` of the module ``ds_npu.cli.NAME``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``ds_npu ARGUMENTS`` (those of the command line by default) and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = Parser(prog="ds_npu", description="Tools around the ds_npu section of a DeepSpeed config.")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    # Import only the named command: `ds_npu sim` starts before every run and must not be slow.
    for name in arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS:
        command: Command = importlib.import_module(f"ds_npu.cli.{name}").COMMAND
        subparser = subparsers.add_parser(command.name, help=command.purpose, description=command.purpose)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    found = parser.parse_args(arguments)
    return _run(found)


def _run(found: Namespace) -> int:
    """Run the command and return its exit code; 130 after Ctrl-C, 1 where its output cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A terminal that cannot show a character shows its escape.
            stream.reconfigure(errors="backslashreplace")
    try:
        code: int = found.run(found)
        print(end="", flush=True)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        _drop_output()
        if not isinstance(error, BrokenPipeError):
            print(f"ds_npu: {error}", file=sys.stderr)
        return 1
    return code


def _drop_output() -> None:
    """Send the rest of the output to /dev/null: Python flushes it at exit and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
