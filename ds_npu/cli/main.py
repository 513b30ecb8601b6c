"""The ``ds_npu`` command."""

from __future__ import annotations

import difflib
import os
import platform
import sys
from argparse import Namespace
from collections.abc import Sequence
from io import TextIOWrapper

from ds_npu.capability.releases import installed_version
from ds_npu.cli.command import Command, Parser, cli_module
from ds_npu.config.problems import shown

COMMANDS = (
    *("accept", "calibrate", "check", "compare", "convert", "inspect"),
    *("predict", "profile", "replay", "schema", "sim"),
)
"""Each is ``COMMAND`` of the module ``ds_npu.cli.NAME``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``ds_npu ARGUMENTS`` (those of the command line by default) and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--version"]:
        # Metadata has the versions: nothing is imported.
        packages = ("torch", "torch_npu", "deepspeed", "transformers")
        installed = [f"{each} {installed_version(each) or 'not installed'}" for each in packages]
        print(f"ds_npu {installed_version('ds_npu')} ({', '.join(installed)}, Python {platform.python_version()})")
        return 0
    parser = Parser(prog="ds_npu", description="Tools around the ds_npu section of a DeepSpeed config.")
    parser.add_argument("--version", action="store_true", help="print the versions of ds_npu and of what it runs on")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    # Import only the named command: `ds_npu sim` starts before every run and must not be slow.
    for name in arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS:
        command: Command = cli_module(name).COMMAND
        subparser = subparsers.add_parser(command.name, help=command.purpose, description=command.purpose)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    if not arguments:
        parser.print_help()
        return 2
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        near = "".join(f", did you mean {each!r}?" for each in difflib.get_close_matches(arguments[0], COMMANDS, n=1))
        parser.error(f"there is no command {shown(arguments[0])}{near}; there are {', '.join(COMMANDS)}")
    return _run(parser.parse_args(arguments))


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
        # Send the rest of the output to /dev/null: Python flushes it at exit and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"ds_npu: {error}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
