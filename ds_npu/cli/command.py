"""A subcommand of ``ds_npu``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn


class Parser(ArgumentParser):
    """Says what is wrong with a command line in one line, which is the last thing on the screen."""

    def error(self, message: str) -> NoReturn:
        line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in message)
        self.exit(2, f"{self.prog}: {line} ({self.prog} --help says more)\n")


@dataclass(frozen=True)
class Command:
    """``ds_npu NAME``: what it is for, what it takes, and what it does."""

    name: str
    purpose: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    """Returns the exit code: 0, or 1 where what was asked about is wrong (2 is argparse's, for wrong usage)."""
