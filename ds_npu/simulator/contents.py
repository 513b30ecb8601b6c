"""The list of simulated functions that ``ds_npu sim --list`` prints."""

from __future__ import annotations

import itertools
import json
import textwrap
from pathlib import Path

from ds_npu.simulator.build import CONTENTS, SOURCES


def markdown(home: Path) -> str:
    """A list item for each source of the build in ``home``: its purpose and its functions of CANN's interface."""
    lines = []
    for source, functions in sorted(json.loads((home / CONTENTS).read_text()).items()):
        shown = [name for name in functions if not name.endswith("GetWorkspaceSize")]
        if shown:
            lines += textwrap.wrap(f"- `{source}`: {_purpose(SOURCES / source)}", 118, subsequent_indent="  ")
            lines += textwrap.wrap(", ".join(shown), 118, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def _purpose(source: Path) -> str:
    """The first sentence of the comment at the top of ``source``."""
    comment = itertools.takewhile(lambda line: line.startswith("// "), source.read_text().splitlines())
    return " ".join(line[3:] for line in comment).partition(". ")[0].rstrip(".") + "."
