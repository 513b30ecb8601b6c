"""The bytes of ordinary files as training data: found, split, and cut into batches that depend on nothing but numbers.

Which bytes a rank sees at a step is a pure function of (seed, step, micro-batch, data-parallel rank). There is no
loader state, so nothing has to be stored to resume exactly.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sysconfig
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np

HELD_OUT_EVERY = 20
"""One file in this many is kept for validation."""
OPEN_FILES_MAX = 64
BYTE_VALUES = 256


class DataError(Exception):
    """The data cannot be used; the message says why, in one line."""


@dataclass(frozen=True)
class SourceFile:
    """One file: where it is, the name it is sorted and split by, and its size when it was found."""

    path: Path
    name: str
    size_bytes: int


# ---- finding the files ----


def standard_library() -> list[SourceFile]:
    """The Python standard library's own sources, which every machine has (installed packages left out)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    packages = {"site-packages", "dist-packages"}
    return [file for file in _folder_files(root) if file.name.endswith(".py") and not packages & set(file.path.parts)]


def find_files(paths: Sequence[str]) -> list[SourceFile]:
    """Every file given or below a folder given, sorted by name; hidden ones and empty ones are left out."""
    if not paths:
        files = standard_library()
    else:
        files = []
        for path in map(Path, paths):
            if path.is_dir():
                files += _folder_files(path)
            elif path.is_file():
                files.append(_source_file(path, path.name))
            else:
                raise DataError(f"--data {path}: there is no such file or folder")
    unique = {os.path.realpath(file.path): file for file in files if file.size_bytes}
    if not unique:
        raise DataError(f"no data: {' '.join(paths) or 'the standard library'} holds no file with a byte in it")
    return sorted(unique.values(), key=lambda file: (file.name, str(file.path)))


def _folder_files(root: Path) -> list[SourceFile]:
    """The files below ``root``, each named by its path relative to ``root``."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read folder {error.filename}: {error.strerror}") from error

    files = []
    for folder, below, names in os.walk(root, onerror=refuse):
        below[:] = [name for name in below if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                files.append(_source_file(path, path.relative_to(root).as_posix()))
    return files


def _source_file(path: Path, name: str) -> SourceFile:
    try:
        with path.open("rb") as stream:
            return SourceFile(path, name, os.fstat(stream.fileno()).st_size)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


# ---- which files are held out ----


def _name_hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "big")


def split_files(files: Sequence[SourceFile]) -> tuple[list[SourceFile], list[SourceFile]]:
    """(training files, validation files): whole files, chosen by a hash of the name, so that adding one moves no other.

    Two or more files always leave at least one on each side. A single file is all training.
    """
    if len(files) < 2:
        return list(files), []
    by_hash = sorted(files, key=lambda file: (_name_hash(file.name), str(file.path)))
    held_out = {file.path for file in by_hash if _name_hash(file.name) % HELD_OUT_EVERY == 0} or {by_hash[0].path}
    if len(held_out) == len(files):
        held_out.remove(by_hash[-1].path)
    return [file for file in files if file.path not in held_out], [file for file in files if file.path in held_out]


def fingerprint(files: Sequence[SourceFile]) -> str:
    """A short name for exactly these names and sizes, in this order."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(os.fsencode(file.name) + b"\0" + str(file.size_bytes).encode() + b"\0")
    return digest.hexdigest()


# ---- the bytes ----


@dataclass
class ByteText:
    """The files' bytes end to end, read through memory maps opened when first needed."""

    files: Sequence[SourceFile]
    _maps: OrderedDict[int, mmap.mmap] = field(default_factory=OrderedDict, repr=False)

    def __post_init__(self) -> None:
        self._ends = list(accumulate(file.size_bytes for file in self.files))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, length: int) -> bytes:
        """``length`` bytes from position ``start``, across as many files as it takes."""
        if start < 0 or start + length > len(self):
            raise IndexError(f"bytes {start} to {start + length} of {len(self)}")
        parts: list[bytes] = []
        while length:
            index = bisect_right(self._ends, start)
            offset = start - (self._ends[index] - self.files[index].size_bytes)
            part = self._map(index)[offset : offset + length]
            parts.append(part)
            start, length = start + len(part), length - len(part)
        return b"".join(parts)

    def _map(self, index: int) -> mmap.mmap:
        if index in self._maps:
            self._maps.move_to_end(index)
            return self._maps[index]
        file = self.files[index]
        try:
            with file.path.open("rb") as stream:
                opened = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file has become empty
            raise DataError(f"cannot read {file.path}: {error}") from error
        if len(opened) != file.size_bytes:
            raise DataError(f"{file.path} changed while training: {file.size_bytes} bytes before, {len(opened)} now")
        self._maps[index] = opened
        if len(self._maps) > OPEN_FILES_MAX:
            self._maps.popitem(last=False)[1].close()
        return opened

    def windows(self, starts: Sequence[int], length: int) -> np.ndarray:
        """The windows beginning at ``starts``: uint8 of shape (len(starts), length)."""
        rows = [np.frombuffer(self.read(start, length), dtype=np.uint8) for start in starts]
        return np.stack(rows) if rows else np.empty((0, length), dtype=np.uint8)


# ---- which bytes, when ----


def shuffled(position: int, count: int, key: int) -> int:
    """Where ``position`` of ``range(count)`` goes in the shuffle named by ``key``: a bijection that needs no table.

    A four-round Feistel network over the smallest even number of bits that holds ``count``; a result outside the range
    is sent through again, which ends because the network itself is a bijection (cycle walking; Black and Rogaway 2002).
    """
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = position >> half_bits, position & mask
        for round_number in range(4):
            left, right = right, left ^ (_mix(key, round_number, right) & mask)
        position = left << half_bits | right
        if position < count:
            return position


def _mix(*numbers: int) -> int:
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


@dataclass(frozen=True)
class BatchShape:
    """How one optimizer step is cut: sequences per rank and micro-batch, micro-batches, data-parallel ranks."""

    micro_batch: int
    accumulation: int
    dp_size: int

    @property
    def sequences_per_step(self) -> int:
        return self.micro_batch * self.accumulation * self.dp_size


@dataclass(frozen=True)
class TrainingBatches:
    """Batches of windows of ``seq_len`` bytes; within one epoch no byte is given twice."""

    text: ByteText
    seq_len: int
    shape: BatchShape
    seed: int

    def __post_init__(self) -> None:
        if len(self.text) < self.seq_len:
            raise DataError(f"the training files hold {len(self.text)} bytes, fewer than --seq-len {self.seq_len}")

    @property
    def windows_per_epoch(self) -> int:
        # One window fewer than fit, so that every epoch can begin at its own offset and cut the text elsewhere.
        return max(1, len(self.text) // self.seq_len - 1)

    def samples(self, step: int, micro: int, dp_rank: int) -> range:
        """The numbers, counted from the start of the run, of the sequences in one rank's micro-batch."""
        first = step * self.shape.sequences_per_step + (micro * self.shape.dp_size + dp_rank) * self.shape.micro_batch
        return range(first, first + self.shape.micro_batch)

    def window_start(self, sample: int) -> int:
        """The first byte of sequence number ``sample``."""
        epoch, position = divmod(sample, self.windows_per_epoch)
        key = _mix(self.seed, epoch)
        offsets = min(self.seq_len, len(self.text) - self.windows_per_epoch * self.seq_len + 1)
        return shuffled(position, self.windows_per_epoch, key) * self.seq_len + key % offsets

    def batch(self, step: int, micro: int, dp_rank: int) -> np.ndarray:
        """One rank's micro-batch: uint8 of shape (micro_batch, seq_len)."""
        starts = [self.window_start(sample) for sample in self.samples(step, micro, dp_rank)]
        return self.text.windows(starts, self.seq_len)


@dataclass(frozen=True)
class ValidationBatches:
    """The same evenly spaced windows of the held-out files every time, dealt over the data-parallel ranks."""

    text: ByteText
    seq_len: int
    windows_wanted: int
    shape: BatchShape

    @property
    def count(self) -> int:
        """How many windows there are, over all ranks."""
        return min(self.windows_wanted, len(self.text) // self.seq_len)

    @property
    def rounds(self) -> int:
        """How many forward passes every rank does: as many as any, since ZeRO-3 gathers parameters in each."""
        return -(-self.count // (self.shape.micro_batch * self.shape.dp_size))

    def batch(self, round_number: int, dp_rank: int) -> tuple[np.ndarray, int]:
        """(windows, how many of them count): a short batch is filled up at its end with windows that do not count."""
        size = self.shape.micro_batch
        first = (round_number * self.shape.dp_size + dp_rank) * size
        spacing = len(self.text) // self.count
        numbers = [min(number, self.count - 1) for number in range(first, first + size)]
        valid = max(0, min(size, self.count - first))
        return self.text.windows([number * spacing for number in numbers], self.seq_len), valid
