"""``ds_npu inspect``: checkpoints in a folder, the layouts that wrote them, their sizes, whether they are whole."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from ds_npu.checkpoint.wholeness import FoundCheckpoint, checkpoints_in, verify
from ds_npu.cli.command import Command, one_line, refused
from ds_npu.config.problems import printable
from ds_npu.log import aligned

MIB = 2**20
ANSWERS = {None: "not known", True: "yes", False: "no"}


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a folder of checkpoints, or one checkpoint")
    parser.add_argument("--verify", action="store_true", help="read all files and compare them with their digests")


def _run(arguments: Namespace) -> int:
    folder: Path = arguments.folder
    if not folder.is_dir():
        return refused("inspect", f"{printable(str(folder))}: there is no such folder")
    found = list(checkpoints_in(folder))
    if not found:
        return refused("inspect", f"{printable(str(folder))}: there is no checkpoint in it")
    for each in found if arguments.verify else ():
        each.problems += verify(each)
    is_one = found[0].folder == folder
    lines = _one(found[0], arguments.verify) if is_one else _several(folder, found, arguments.verify)
    for line in lines:
        print(one_line(line))
    return 1 if any(each.problems for each in found) else 0


def _several(folder: Path, found: Sequence[FoundCheckpoint], is_verified: bool) -> Iterator[str]:
    whole = next((each for each in found if _is_whole(each)), None)
    count = "1 checkpoint" if len(found) == 1 else f"{len(found)} checkpoints"
    newest = f"the newest whole one is {whole.folder.name}" if whole else "none of them is known to be whole"
    yield f"{folder}: {count}, {newest}{' (all files were read)' if is_verified else ''}"
    yield ""
    rows = [(each.folder.name, _when(each), each.kind, *_sizes(each), ANSWERS[_is_whole(each)]) for each in found]
    yield from aligned([("tag", "saved", "layout", "files", "MiB", "whole"), *rows])
    yield from _problems(found)


def _one(found: FoundCheckpoint, is_verified: bool) -> Iterator[str]:
    whole = {None: "not known to be whole", True: "whole", False: "not whole"}[_is_whole(found)]
    yield f"{found.folder}: {whole}{', all files were read' if is_verified else ''}"
    yield ""
    parts = {name: part for manifest in found.manifests for name, part in manifest.parts.items()}
    stepped = {name for manifest in found.manifests for name, part in manifest.parts.items() if part.state is not None}
    elements = sum(math.prod(part.plain_shape) for part in parts.values())
    dtypes = sorted({(part.dtype or "unknown").removeprefix("torch.") for part in parts.values()})
    files, mib = _sizes(found)
    rows = [("layout", found.kind), ("saved", _when(found))]
    if parts:
        rows.append(("weights", f"{len(parts):,} of {elements:,} elements, {', '.join(dtypes)}"))
        rows.append(("optimizer", f"the state of {len(stepped):,} weights" if stepped else "no state"))
    yield from aligned([*rows, ("files", f"{files}, {mib} MiB")])
    yield ""
    yield from aligned([("file", "MiB"), *((name, f"{size / MIB:,.1f}") for name, size in sorted(found.files.items()))])
    yield from _problems([found])


def _is_whole(found: FoundCheckpoint) -> bool | None:
    if found.problems:
        return False
    return True if found.manifests else None


def _when(found: FoundCheckpoint) -> str:
    return datetime.fromtimestamp(found.saved_at).strftime("%Y-%m-%d %H:%M:%S") if found.saved_at else ""


def _sizes(found: FoundCheckpoint) -> tuple[str, str]:
    return f"{len(found.files):,}", f"{found.bytes / MIB:,.1f}"


def _problems(found: Iterable[FoundCheckpoint]) -> Iterator[str]:
    for each in found:
        for problem in each.problems:
            yield f"{each.folder.name}: {problem}"


PURPOSE = "tell which checkpoints are in a folder, for which layout, how large, and whether they are whole"
COMMAND = Command("inspect", PURPOSE, _add_arguments, _run)
