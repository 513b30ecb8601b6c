"""What is simulated, as a table."""

from __future__ import annotations

import json
from pathlib import Path

from ds_npu.simulator.build import CONTENTS, SOURCES


def markdown(home: Path) -> str:
    """The sources of the build in ``home``: what each holds, and the functions of CANN's interface in it."""
    lines = ["| source | holds | functions |", "| --- | --- | --- |"]
    for source, functions in sorted(json.loads((home / CONTENTS).read_text()).items()):
        shown = [name for name in functions if not name.endswith("GetWorkspaceSize")]
        if shown:
            lines.append(f"| `{source}` | {_purpose(SOURCES / source)} | {' '.join(shown)} |")
    return "\n".join(lines)


def _purpose(source: Path) -> str:
    """The first sentence of the comment at the top of ``source``."""
    comment = []
    for line in source.read_text().splitlines():
        if not line.startswith("// "):
            break
        comment.append(line[3:])
    return " ".join(comment).partition(". ")[0].rstrip(".") + "."
