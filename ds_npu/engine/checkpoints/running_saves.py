"""The saves of this process that run behind training, for callers that do not import DeepSpeed."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Protocol


class RunningSaves(Protocol):
    """The saves of one engine."""

    folder: Path | None
    """The folder of the checkpoint that was begun last."""

    def is_saved(self) -> bool:
        """Wait until the running save has ended; whether it is on the disk."""


RUNNING: weakref.WeakSet[RunningSaves] = weakref.WeakSet()
"""The saves of this process's engines."""


def are_saved_in(folder: Path) -> bool:
    """Wait for this process's saves to ``folder`` or a folder in it; return whether all of them are on the disk.

    The next optimizer step raises the error of a save that has failed.
    """
    inside = [each for each in RUNNING if each.folder is not None and each.folder.is_relative_to(folder.absolute())]
    return all(each.is_saved() for each in inside)
