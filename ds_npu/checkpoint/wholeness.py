"""Checkpoints in a folder: the layout that wrote each, its files and bytes, and whether it is whole."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ds_npu.checkpoint.contents import fingerprint
from ds_npu.checkpoint.digests import damages
from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.manifest import FILE, Manifest, manifest_of_json, manifest_path, text_of_manifest

OF_DEEPSPEED = re.compile(r".*(model|optim)_states\.pt")
UNIVERSAL = "zero"
"""The folder, in a universal checkpoint, that has a folder for each weight."""
UNFINISHED = ".unfinished"
"""The end of names of files that are being written."""


@dataclass
class FoundCheckpoint:
    """A checkpoint in ``folder`` as its manifests describe it; the values in its files are not read."""

    folder: Path
    manifests: list[Manifest] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Sentences that say why it is not whole; empty where it is."""
    saved_at: float = 0.0
    """When its last manifest, or without manifests its last file, was written, in seconds since 1970."""
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of each of its files, by name."""

    @property
    def kind(self) -> str:
        """The layout that wrote it, in words."""
        if self.manifests or self.problems:
            return self.manifests[0].layout if self.manifests else "unknown"
        return "DeepSpeed universal" if (self.folder / UNIVERSAL).is_dir() else "DeepSpeed, without manifests"

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


def found_checkpoint(folder: Path) -> FoundCheckpoint | None:
    """The checkpoint in ``folder``; None where there is none. Its archives' directories are read, values are not."""
    first = manifest_path(folder, 0)
    paths = sorted(folder.glob(FILE.format(0).replace("00000", "*")))
    if not paths and not _is_checkpoint(folder):
        return None
    found = FoundCheckpoint(folder)
    try:
        if not paths:
            every = (path for path in folder.rglob("*") if path.is_file())
            found.files = {str(path.relative_to(folder)): path.stat().st_size for path in every}
            found.saved_at = max(path.stat().st_mtime for path in folder.iterdir())
            return found
        found.saved_at = max(path.stat().st_mtime for path in paths)
        ranks = _read_manifest(found, first).ranks
        for rank in range(1, ranks):
            _read_manifest(found, manifest_path(folder, rank))
    except (CheckpointError, OSError) as error:
        found.problems.append(_sentence(error))
        return found
    for manifest in found.manifests:
        found.problems += _problems(folder, manifest, found.files)
    return found


def checkpoints_in(folder: Path) -> Iterator[FoundCheckpoint]:
    """The checkpoint in ``folder``, or those in its folders, the newest first."""
    own = found_checkpoint(folder)
    if own is not None:
        yield own
        return
    inside = (found_checkpoint(each) for each in folder.iterdir() if each.is_dir())
    yield from sorted((each for each in inside if each is not None), key=lambda each: each.saved_at, reverse=True)


def name_in(path: Path) -> str | None:
    """The name that a file such as ``latest`` holds; None where it is not there.

    Bytes that are no text become a name that no checkpoint has.
    """
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else None


def newest_whole(folder: Path, without: Path | None = None) -> Path | None:
    """The newest checkpoint in ``folder`` that is whole, as far as no values are read; None where there is none."""
    try:
        found = list(checkpoints_in(folder))
    except OSError:
        return None
    whole = (each for each in found if each.manifests and not each.problems and each.folder != without)
    return next((each.folder for each in whole), None)


def verify(found: FoundCheckpoint) -> list[str]:
    """Read all files of a checkpoint whole; return sentences about the ones that are not as they were written."""
    problems = []
    for manifest in found.manifests:
        there = {name: each for name, each in manifest.digests.items() if (found.folder / name).is_file()}
        try:
            problems += [str(each) for each in damages(found.folder, there)]
        except OSError as error:
            problems.append(_sentence(error))
        problems += [f"{name} has no digests" for name in manifest.files if name not in manifest.digests]
    return problems


def _is_checkpoint(folder: Path) -> bool:
    return any(OF_DEEPSPEED.fullmatch(path.name) for path in folder.iterdir() if path.is_file())


def _read_manifest(found: FoundCheckpoint, path: Path) -> Manifest:
    if not path.exists():
        raise CheckpointError(f"{path.name} is missing")
    manifest = manifest_of_json(text_of_manifest(path), path)
    found.manifests.append(manifest)
    return manifest


def _problems(folder: Path, manifest: Manifest, sizes: dict[str, int]) -> Iterator[str]:
    for name, expected in {**dict.fromkeys(manifest.digests, ""), **manifest.files}.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
            continue
        sizes[name] = size = path.stat().st_size
        digests = manifest.digests.get(name)
        if digests is not None and digests.size != size:
            yield f"{name} has {size:,} bytes, and {digests.size:,} were written"
            continue
        try:
            is_same = not expected or fingerprint(path) == expected
        except (OSError, zipfile.BadZipFile) as error:
            yield f"{name} cannot be read: {error}"
        else:
            if not is_same:
                yield f"{name} is of another save"


def _sentence(error: Exception) -> str:
    return str(error).partition(". What to do:")[0]
