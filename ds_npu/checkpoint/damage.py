"""The tensors and weights that a damaged chunk of a file belongs to, and the newest whole checkpoint near it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ds_npu.capability.named_classes import AllowedClass
from ds_npu.checkpoint.contents import CheckpointFiles, file_position, tensors_in
from ds_npu.checkpoint.digests import DamagedFileError
from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.manifest import Keys, Manifest, WrittenPart
from ds_npu.checkpoint.wholeness import newest_whole

LISTED = 6
"""How many tensors an error lists; the others are counted."""


def damage_message(error: DamagedFileError, classes: Sequence[AllowedClass], manifests: Sequence[Manifest]) -> str:
    """The message of a CheckpointError: the file, its bytes, the tensors in them, and what to load in its place."""
    names = damaged_tensors(error, classes, manifests)
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    held = f". In them are elements of {', '.join(names[:LISTED])}{more}" if names else ""
    folder = error.path.parent
    whole = newest_whole(folder.parent, without=folder)
    next_one = (
        f"load {whole.name}, the newest whole checkpoint in {whole.parent}" if whole else "load another checkpoint"
    )
    return f"{error}: the file is damaged{held}. What to do: copy it again; or {next_one}"


def damaged_tensors(
    error: DamagedFileError, classes: Sequence[AllowedClass], manifests: Sequence[Manifest]
) -> list[str]:
    """Names of the tensors with elements in the damaged chunk: weights by their manifests, else paths in the file."""
    if error.span is None:
        return []
    # Without digests, since the damage may be in the part that tells where tensors are.
    files = CheckpointFiles(error.path.parent, classes)
    try:
        content = files.named(error.path.name)
    except (CheckpointError, DamagedFileError):
        return []
    finally:
        files.close()
    first, last = error.span
    found: dict[str, list[str]] = {}
    for keys, tensor in tensors_in(content):
        begin = file_position(tensor)
        if begin is None:
            return []
        begin += int(tensor.storage_offset()) * tensor.itemsize
        if begin < last and first < begin + tensor.nbytes:
            elements = (first - begin) // tensor.itemsize, -((begin - last) // tensor.itemsize)
            names = list(_weights(manifests, error.path.name, keys, elements))
            for name, what in names or [("/".join(map(str, keys)), "")]:
                found.setdefault(name, []).append(what)
    return [name if not any(kinds) else f"{name} ({', '.join(filter(None, kinds))})" for name, kinds in found.items()]


def _weights(
    manifests: Sequence[Manifest], file: str, keys: Keys, elements: tuple[int, int]
) -> Iterator[tuple[str, str]]:
    """Names of the weights that have some of the ``elements`` of the tensor at ``keys``.

    Each comes with the key of its state; "" for the weight itself.
    """
    for manifest in manifests:
        for name, part in manifest.parts.items():
            for run, way, what in _runs(part, keys):
                is_in = run.start < elements[1] and elements[0] < run.start + run.numel
                if run.file == file and run.keys == way and is_in:
                    yield name, what


def _runs(part: WrittenPart, keys: Keys) -> Iterator[tuple[Any, Keys, str]]:
    if part.value is not None:
        yield part.value, keys, ""
    if part.narrow is not None:
        yield part.narrow, keys, ""
    if part.state is not None and keys:
        yield part.state, keys[:-1], str(keys[-1])
