"""A subcommand of ``ds_npu``."""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


def one_line(text: str) -> str:
    """``text`` on one line, uncut: characters that cannot be printed are escaped."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class Parser(ArgumentParser):
    """A parser whose errors are one line, the last one printed."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)} ({self.prog} --help says more)\n")


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """``parse`` for argparse, which shows the text of its errors."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error

    return parsed


def cli_module(name: str) -> Any:
    """The module ``ds_npu.cli.<name>``, imported when it is needed, as some imports take seconds."""
    return importlib.import_module(f"ds_npu.cli.{name}")


def refused(command: str, why: str, code: int = 2) -> int:
    """Say why ``ds_npu COMMAND`` runs nothing; returns the exit code."""
    print(f"ds_npu {command}: {why}", file=sys.stderr)
    return code


@dataclass(frozen=True)
class Command:
    """The subcommand ``ds_npu NAME``: its purpose, its arguments, and the function that runs it."""

    name: str
    purpose: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    """Runs it and returns the exit code: 0, or 1 where the checked file is wrong (argparse has 2 for wrong usage)."""
