"""Records where each weight and its optimizer state are in the files of a checkpoint, whatever layout wrote them.

Each rank that writes one of DeepSpeed's files writes a manifest next to it: which elements of which weights are where.
``ds_npu.checkpoint.written`` puts weights together by them. Strangers may have written the JSON of a manifest: all of
it is checked before anything relies on it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shown
from typing import Any, TypeVar

from ds_npu.checkpoint.digests import CHUNK_BYTES, DIGEST_CHARACTERS, FileDigests, digest_of
from ds_npu.checkpoint.files import CheckpointError
from ds_npu.parallel.tensor.sharding import Ranges, Sharding
from ds_npu.topology.degrees import AXES, Axis

FILE = "ds_npu_layout_rank_{:05d}.json"
VERSION = 2
"""Since 2 a manifest has the dtypes of weights, and names no values of a weight that was left out of the files."""
MODULE = "module"
"""The key, in DeepSpeed's files of models, of the weights by name."""
JSON_KEYS = {"coordinates": "place"}
"""Keys in the JSON, by field, where they differ from the field's name."""
READABLE = (1, VERSION)
MOST_RANKS = 2**24
MOST_ELEMENTS = 2**53
MOST_DIMS = 16
MOST_KEYS = 8
"""Most keys on the path to a tensor."""
SEAL = re.compile(rf'\{{"digest": "([0-9a-f]{{{DIGEST_CHARACTERS}}})", ')
"""The beginning of a manifest that has a digest of what follows."""
DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARACTERS}}}")
EXPECTED = {str: "text", bool: "true or false", list: "a list", dict: "an object"}

T = TypeVar("T")

Keys = tuple[str | int, ...]
"""The path of a tensor in a file of nested dicts and lists."""


@dataclass(frozen=True)
class WrittenRun:
    """Elements of one rank's part of a weight that follow each other in a tensor of a file; both are taken as flat."""

    file: str
    keys: Keys
    """The path of the tensor; for an optimizer's state, of the dict that has its tensors."""
    start: int
    """Index of the first element in the tensor."""
    first: int
    """Index of the first element in the part."""
    numel: int


@dataclass(frozen=True)
class WrittenPart:
    """The part of a weight or buffer that one rank has written."""

    shape: tuple[int, ...]
    shardings: Mapping[Axis, Sharding] = field(default_factory=dict)
    """Sharding along each axis, in the order in which the part was taken from the plain weight."""
    coordinates: Mapping[Axis, int] = field(default_factory=dict)
    """The rank along each of these axes."""
    value: WrittenRun | None = None
    """The values; None: they are in other ranks' files, or in none."""
    state: WrittenRun | None = None
    """The optimizer's state; None: it is in other ranks' files, or there is none."""
    group: int | None = None
    """Index of its parameter group's settings in ``Manifest.groups``; None without one."""
    dtype: str | None = None
    """Its dtype in the model; None in manifests of version 1."""
    narrow: WrittenRun | None = None
    """The values in the model's 16-bit dtype, where ``value`` names float32 masters; None: no file has them."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """The shape of the weight in the plain model."""
        shape = list(self.shape)
        for sharding in reversed(list(self.shardings.values())):
            shape[sharding.dim] = sharding.size
        return tuple(shape)

    def like(self, other: WrittenPart) -> bool:
        """Whether both have the same elements at the same positions; experts may have moved between ranks."""
        is_same = (self.value, self.state) == (other.value, other.state)
        return is_same and self.is_part_like(other) and is_readable_as(self.dtype, other.dtype)

    def is_part_like(self, other: WrittenPart) -> bool:
        """Whether both are the same part of weights of the same shape."""
        return self._described() == other._described()

    def _described(self) -> object:
        sizes = {
            axis: (each.dim, [each.length(rank) for rank in range(len(each.ranges))])
            for axis, each in self.shardings.items()
        }
        return self.shape, sizes, self.shardings.get("tp"), dict(self.coordinates)


def is_readable_as(one: str | None, other: str | None) -> bool:
    """Whether numbers of one dtype can be copied to the other: floating-point numbers of any width, else the same."""
    return one is None or other is None or one == other or ("float" in one and "float" in other)


@dataclass(frozen=True)
class Manifest:
    """The content of one rank's files."""

    parts: Mapping[str, WrittenPart]
    """Parts of weights and buffers, by name in the plain model."""
    ranks: int
    """The number of ranks that wrote the checkpoint, also those that have no files of their own."""
    groups: Sequence[Mapping[str, Any]] = ()
    """The settings of the optimizer's parameter groups, as far as JSON can hold them."""
    model_file: str | None = None
    """The file with the run's counters, which the first data ranks write, or all ranks."""
    layout: str = ""
    """The layout of the run that wrote it, in words for an error."""
    is_known: bool = True
    """Whether the positions of weights in the files are known; False: only the same layout reads them."""
    leaves_out_frozen: bool = False
    """Whether frozen weights were left out of the files."""
    version: int = VERSION
    files: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints, by name, of the files that the rank wrote in the same save; empty where they are not known."""
    digests: Mapping[str, FileDigests] = field(default_factory=dict)
    """Digests of the chunks of the same files; empty in manifests of earlier commits."""

    def sealed(self) -> str:
        """The text of its file: JSON that begins with a digest of the rest."""
        rest = self.to_json()[1:]
        return f'{{"digest": "{digest_of(rest.encode())}", {rest}'

    def to_json(self) -> str:
        return json.dumps(
            dataclasses.asdict(
                self, dict_factory=lambda pairs: {JSON_KEYS.get(key, key): value for key, value in pairs}
            )
        )

    def like(self, other: Manifest) -> bool:
        """Whether both have the same elements at the same positions."""
        is_like_run = (self.ranks, self.is_known) == (other.ranks, other.is_known)
        is_like_run = is_like_run and (self.is_known or self.layout == other.layout)
        return is_like_run and self._has_parts(other, WrittenPart.like)

    def has_parts_like(self, other: Manifest) -> bool:
        """Whether both ranks hold the same parts of the model."""
        return self._has_parts(other, WrittenPart.is_part_like)

    def _has_parts(self, other: Manifest, is_like: Callable[[WrittenPart, WrittenPart], bool]) -> bool:
        has_names = self.parts.keys() == other.parts.keys()
        return has_names and all(is_like(part, other.parts[name]) for name, part in self.parts.items())


def manifest_path(folder: Path, rank: int) -> Path:
    """The path of the manifest of the global ``rank`` in the ``folder`` of a checkpoint."""
    return folder / FILE.format(rank)


def text_of_manifest(path: Path) -> str:
    """The text of a manifest; raises CheckpointError for a file that is not there, or whose bytes are no text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. What to do: copy the whole folder again") from error


class _WrongJsonError(ValueError):
    """A value that no manifest has."""


def manifest_of_json(text: str, path: Path) -> Manifest:
    """Parse and check a manifest; raises CheckpointError for another version, damage and wrong values."""
    seal = SEAL.match(text)
    if seal is not None and digest_of(text[seal.end() :].encode()) != seal[1]:
        raise CheckpointError(
            f"{path} is damaged: its digest is not that of the rest. What to do: copy the whole folder again, or load "
            "an earlier checkpoint"
        )
    try:
        found = _typed(dict, json.loads(text), "the manifest")
        if found.get("version") not in READABLE:
            raise CheckpointError(
                f"{path}: found version {shown(found.get('version'))}, and this ds_npu reads "
                f"{' and '.join(map(str, READABLE))}. What to do: load the checkpoint with the ds_npu that wrote it, "
                "and save_pretrained there"
            )
        return _manifest(found)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no manifest of a checkpoint: {error}. What to do: copy the whole folder again, or load an "
            "earlier checkpoint"
        ) from error


def plain_name(found: object, what: str) -> str:
    """Return ``found``, the name of a file in the manifest's folder; raises ValueError for one that leads elsewhere."""
    name = _typed(str, found, what)
    if name in ("", ".", "..") or any(sign in name for sign in "/\\\0:"):
        raise _WrongJsonError(f"{what}: expected the plain name of a file in the same folder, found {shown(name)}")
    return name


def _manifest(found: dict[str, Any]) -> Manifest:
    groups = [
        _group(each, f"groups[{index}]") for index, each in enumerate(_typed(list, _of(found, "groups"), "groups"))
    ]
    named = _typed(dict, _of(found, "parts"), "parts").items()
    model_file = _of(found, "model_file")
    return Manifest(
        parts={name: _part(_typed(dict, part, shown(name)), shown(name), len(groups)) for name, part in named},
        ranks=_number(_of(found, "ranks"), "ranks", MOST_RANKS, least=1),
        groups=groups,
        model_file=None if model_file is None else plain_name(model_file, "model_file"),
        layout=_typed(str, found.get("layout", ""), "layout"),
        is_known=_typed(bool, found.get("is_known", True), "is_known"),
        leaves_out_frozen=_typed(bool, found.get("leaves_out_frozen", False), "leaves_out_frozen"),
        version=found["version"],
        files={
            plain_name(name, "files"): _typed(str, each, f"files.{shown(name)}")
            for name, each in _typed(dict, found.get("files", {}), "files").items()
        },
        digests={
            plain_name(name, "digests"): _digests(_typed(dict, each, f"digests.{shown(name)}"), shown(name))
            for name, each in _typed(dict, found.get("digests", {}), "digests").items()
        },
    )


def _digests(found: dict[str, Any], name: str) -> FileDigests:
    size = _number(_of(found, "size", name), f"size of {name}", MOST_ELEMENTS)
    chunks = _typed(list, _of(found, "chunks", name), f"chunks of {name}")
    if len(chunks) != -(-size // CHUNK_BYTES) or not all(
        isinstance(each, str) and DIGEST.fullmatch(each) for each in chunks
    ):
        raise _WrongJsonError(f"chunks of {name}: expected {-(-size // CHUNK_BYTES)} digests of {size} bytes")
    return FileDigests(size, tuple(chunks))


def _group(found: object, what: str) -> dict[str, Any]:
    group = _typed(dict, found, what)
    for key, value in group.items():
        if value is not None and not isinstance(value, bool | int | float | str | list):
            raise _WrongJsonError(f"{what}.{key}: expected a number, text or a list, found {shown(value)}")
    return group


def _part(found: dict[str, Any], name: str, groups: int) -> WrittenPart:
    sizes = _typed(list, _of(found, "shape", name), f"shape of {name}")
    if len(sizes) > MOST_DIMS:
        raise _WrongJsonError(f"shape of {name}: expected at most {MOST_DIMS} dims, found {len(sizes)}")
    shape = tuple(_number(size, f"shape of {name}", MOST_ELEMENTS) for size in sizes)
    if math.prod(shape) > MOST_ELEMENTS:
        raise _WrongJsonError(f"shape of {name}: expected at most {MOST_ELEMENTS} elements, found {list(shape)}")
    group = _of(found, "group", name)
    dtype = found.get("dtype")
    coordinates: dict[Any, int] = _typed(dict, _of(found, "place", name), f"place of {name}")
    part = WrittenPart(
        shape,
        _shardings(_typed(dict, _of(found, "shardings", name), f"shardings of {name}"), name, len(shape)),
        coordinates,
        _run(_of(found, "value", name), f"value of {name}", math.prod(shape)),
        _run(_of(found, "state", name), f"state of {name}", math.prod(shape)),
        None if group is None else _number(group, f"group of {name}", groups - 1),
        None if dtype is None else _typed(str, dtype, f"dtype of {name}"),
        _run(found.get("narrow"), f"16-bit values of {name}", math.prod(shape)),
    )
    _check_coordinates(part, name)
    return part


def _shardings(found: dict[str, Any], name: str, dims: int) -> dict[Axis, Sharding]:
    unknown = [axis for axis in found if axis not in AXES]
    if unknown:
        raise _WrongJsonError(f"shardings of {name}: expected axes of {', '.join(AXES)}, found {shown(unknown[0])}")
    named: dict[Any, Any] = found
    return {axis: _sharding(_typed(dict, each, name), f"{axis} of {name}", dims) for axis, each in named.items()}


def _sharding(found: dict[str, Any], what: str, dims: int) -> Sharding:
    size = _number(_of(found, "size", what), f"size along {what}", MOST_ELEMENTS)
    ranges = tuple(
        _ranges(each, what, size) for each in _typed(list, _of(found, "ranges", what), f"ranges along {what}")
    )
    reached = 0
    for start, stop in sorted(each for held in ranges for each in held):
        if start > reached:
            break
        reached = max(reached, stop)
    if reached != size or not ranges:
        raise _WrongJsonError(f"ranges along {what}: no rank has the indices from {reached} on, of {size}")
    return Sharding(_number(_of(found, "dim", what), f"dim along {what}", dims - 1), size, ranges)


def _ranges(found: object, what: str, size: int) -> Ranges:
    held = []
    for each in _typed(list, found, f"ranges along {what}"):
        bounds = [_number(bound, f"ranges along {what}", size) for bound in _typed(list, each, f"ranges along {what}")]
        if len(bounds) != 2 or bounds[0] > bounds[1]:
            raise _WrongJsonError(f"ranges along {what}: expected a start and a stop, found {shown(each)}")
        held.append((bounds[0], bounds[1]))
    return tuple(held)


def _check_coordinates(part: WrittenPart, name: str) -> None:
    """Raise where the coordinates of the rank's part, or its shape, contradict its shardings."""
    if part.coordinates.keys() != part.shardings.keys():
        raise _WrongJsonError(
            f"place of {name}: expected {list(part.shardings)}, found {shown(list(part.coordinates))}"
        )
    shape = list(part.plain_shape)
    for axis, sharding in part.shardings.items():
        rank = _number(part.coordinates[axis], f"place of {name}", len(sharding.ranges) - 1)
        if shape[sharding.dim] != sharding.size:
            raise _WrongJsonError(f"{axis} of {name}: expected size {shape[sharding.dim]}, found {sharding.size}")
        shape[sharding.dim] = sharding.length(rank)
    if tuple(shape) != part.shape:
        raise _WrongJsonError(f"shape of {name}: its shardings make {shape}, found {list(part.shape)}")


def _run(found: object, what: str, elements: int) -> WrittenRun | None:
    if found is None:
        return None
    run = _typed(dict, found, what)
    keys = _typed(list, _of(run, "keys", what), f"keys of {what}")
    if not 0 < len(keys) <= MOST_KEYS or not all(type(key) in (str, int) for key in keys):
        raise _WrongJsonError(f"keys of {what}: expected 1 to {MOST_KEYS} names and indices, found {shown(keys)}")
    if any(isinstance(key, int) and key < 0 for key in keys):
        raise _WrongJsonError(f"keys of {what}: found a negative index in {shown(keys)}")
    start, first, numel = (
        _number(_of(run, key, what), f"{key} of {what}", MOST_ELEMENTS) for key in ("start", "first", "numel")
    )
    if first + numel > elements and numel > 0:
        raise _WrongJsonError(f"{what}: expected elements up to {elements}, found {first} to {first + numel}")
    return WrittenRun(plain_name(_of(run, "file", what), f"file of {what}"), tuple(keys), start, first, numel)


def _of(found: Mapping[str, Any], key: str, what: str = "the manifest") -> Any:
    if key not in found:
        raise _WrongJsonError(f"{what} has no {key}")
    return found[key]


def _number(found: object, what: str, most: int, least: int = 0) -> int:
    if type(found) is not int or not least <= found <= most:
        raise _WrongJsonError(f"{what}: expected an integer from {least} to {most}, found {shown(found)}")
    return found


def _typed(kind: type[T], found: object, what: str) -> T:
    if not isinstance(found, kind):
        raise _WrongJsonError(f"{what}: expected {EXPECTED[kind]}, found {shown(found)}")
    return found
