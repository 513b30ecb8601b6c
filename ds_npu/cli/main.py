"""The ``ds_npu`` command."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from ds_npu.cli.check import CHECK
from ds_npu.cli.command import Command
from ds_npu.cli.schema import SCHEMA
from ds_npu.cli.sim import SIM

COMMANDS: tuple[Command, ...] = (CHECK, SCHEMA, SIM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``ds_npu ARGUMENTS`` (those of the command line by default) and return the exit code."""
    parser = ArgumentParser(prog="ds_npu", description="Tools around the ds_npu section of a DeepSpeed config.")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.purpose, description=command.purpose)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    found = parser.parse_args(arguments)
    code: int = found.run(found)
    return code


if __name__ == "__main__":
    sys.exit(main())
