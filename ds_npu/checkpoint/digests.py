"""Digests of the chunks of a file: made while it is written, compared while it is read, for the chunks that are read.

They find damage, not malice: who can change a file can change its manifest.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CHUNK_BYTES = 4 * 2**20
DIGEST_CHARACTERS = 32
"""Hexadecimal characters of a digest: the first 16 bytes of a SHA-256."""
HEADER_BYTES = 30
"""Bytes of the header of an archive's record, without its name."""
KEPT_CHUNKS = 8
"""Chunks that are kept in memory: a weight's master and moments are read in turns, and are far apart in the file."""
SMALL_BYTES = 2**16
"""Smaller pieces are written and hashed with the next large one: to hand each to the threads takes longer."""
FLUSHED_BYTES = 2**24
"""After so many written bytes Linux is told to begin to write them to the disk."""


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """The digest of bytes."""
    return hashlib.sha256(data).hexdigest()[:DIGEST_CHARACTERS]


@dataclass(frozen=True)
class FileDigests:
    """The digests of a file's chunks, which are of CHUNK_BYTES; the last one may be shorter."""

    size: int
    """Bytes of the file."""
    chunks: tuple[str, ...]


def digests_of(data: bytes | bytearray | memoryview) -> FileDigests:
    """The digests of the chunks of a file whose bytes are ``data``."""
    view = memoryview(data)
    chunks = (view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES))
    return FileDigests(len(view), tuple(map(digest_of, chunks)))


class DamagedFileError(Exception):
    """A file is not what was written: ``chunk`` (None: its size) differs."""

    def __init__(self, path: Path, chunk: int | None, message: str) -> None:
        self.path, self.chunk = path, chunk
        super().__init__(f"{path}: {message}")

    @property
    def span(self) -> tuple[int, int] | None:
        """The first byte of the damaged chunk, and the first one behind it; None for a file of another size."""
        return None if self.chunk is None else (self.chunk * CHUNK_BYTES, (self.chunk + 1) * CHUNK_BYTES)


class DigestedWriter(io.RawIOBase):
    """A new file at ``path`` whose chunks are written by one thread, and hashed by another.

    ``lasting``: sizes, by address, of memory that does not change before the writer is closed: ``write`` of it returns
    before it is written. Leaving the writer's context flushes the file to the disk. Raises OSError where the file
    cannot be written, in the same call or in a later one.
    """

    def __init__(self, path: Path, lasting: Mapping[int, int] | None = None) -> None:
        super().__init__()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._lasting = lasting or {}
        self._threads = [ThreadPoolExecutor(1, f"ds_npu_digests_{each}") for each in ("writes", "hashes")]
        self._begun: list[Future[None]] = []
        self._small = bytearray()
        """Small pieces that are written with the next large one."""
        self._size, self._chunks, self._current = 0, list[str](), hashlib.sha256()
        self._written = self._flushed = 0
        """Bytes that were written, and how many of them Linux was told to write to the disk."""
        self._failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write all of ``data``, a buffer of bytes; returns its size in bytes."""
        view = memoryview(data)
        if len(view) < SMALL_BYTES:
            self._small += view
            return len(view)
        self._begin(view)
        if len(view) > self._lasting.get(_address(view), 0):  # The caller may change its buffer once this returns.
            self._finish()
        if self._failure is not None:
            raise self._failure
        return len(view)

    def _begin(self, *views: memoryview) -> None:
        """Let the threads write and hash the small pieces, then ``views``."""
        pieces = [memoryview(self._small), *views]
        self._small = bytearray()
        for thread, action in zip(self._threads, (self._write_all, self._hash), strict=True):
            try:
                self._begun.append(thread.submit(action, pieces))
            except RuntimeError:  # The interpreter ends, and lets threads begin nothing more.
                self._finish()
                action(pieces)

    def _finish(self) -> None:
        while self._begun:
            self._begun.pop(0).result()

    def _write_all(self, pieces: list[memoryview]) -> None:
        try:
            for view in pieces:
                while len(view) and self._failure is None:
                    count = os.write(self._descriptor, view[:CHUNK_BYTES])
                    view = view[count:]
                    self._written = self._written + count
                    self._send_to_disk()
        except OSError as error:
            self._failure = error

    def _send_to_disk(self) -> None:
        """Tell Linux to begin to write to the disk, without waiting for it: less is left to flush at the end."""
        if self._written - self._flushed >= FLUSHED_BYTES:
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, self._flushed, self._written - self._flushed, os.POSIX_FADV_DONTNEED)
            self._flushed = self._written

    def _hash(self, pieces: list[memoryview]) -> None:
        for view in pieces:
            while len(view):
                piece = view[: CHUNK_BYTES - self._size % CHUNK_BYTES]
                self._current.update(piece)
                self._size += len(piece)
                view = view[len(piece) :]
                if self._size % CHUNK_BYTES == 0:
                    self._end_chunk()

    def _end_chunk(self) -> None:
        self._chunks.append(self._current.hexdigest()[:DIGEST_CHARACTERS])
        self._current = hashlib.sha256()

    def digests(self) -> FileDigests:
        """The digests of all that was written; call it after the writer's context."""
        if len(self._chunks) * CHUNK_BYTES < self._size:
            self._end_chunk()
        return FileDigests(self._size, tuple(self._chunks))

    def __exit__(self, kind: object, *args: object) -> None:
        try:
            if kind is None:
                self._begin()
                self._finish()
                if self._failure is not None:
                    raise self._failure
                os.fsync(self._descriptor)
        finally:
            self.close()

    def close(self) -> None:
        if not self.closed:
            for each in self._threads:
                each.shutdown()
            os.close(self._descriptor)
        super().close()


def _address(view: memoryview) -> int:
    """The address of the bytes of ``view``."""
    found: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return found


def flush_folder(folder: Path) -> None:
    """Flush the names in ``folder`` to the disk; nothing is raised where the file system cannot do that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class VerifiedReader(io.RawIOBase):
    """The file at ``path``, whose chunks are compared with ``digests`` (None: not known) when they are first read.

    torch's reader of archives swallows errors of the file that it is given: the first error is kept in ``failure``, and
    nothing more is read. Raises OSError where the file cannot be opened.
    """

    def __init__(self, path: Path, digests: FileDigests | None) -> None:
        super().__init__()
        self.path, self._digests = path, digests
        self._descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._descriptor).st_size
        self.failure: DamagedFileError | OSError | None = None
        self.headers: frozenset[int] = frozenset()
        """Offsets of an archive's headers.

        They are read without verifying their chunk: the archive's directory tells the same.
        """
        if digests is not None and digests.size != self.size:
            message = f"it has {self.size:,} bytes, and {digests.size:,} were written"
            self.failure = DamagedFileError(path, None, message)
        self.bytes_read = 0
        """Bytes that were read from the file."""
        self._position = 0
        self._verified: set[int] = set()
        self._lasting: frozenset[int] = frozenset()
        """Indices of the chunks that are kept until the file is closed, once they are read."""
        self._kept: dict[int, bytearray] = {}
        """The chunks of which parts were read last, by their index; the latest is the last entry."""

    def keep(self, offsets: Iterable[int]) -> None:
        """Keep the chunks that hold the bytes at ``offsets``, once they are read, until the file is closed."""
        self._lasting = frozenset(each // CHUNK_BYTES for each in offsets)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = max(start + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self.size - self._position, 0)]
        try:
            self.read_at(self._position, view)
        except (DamagedFileError, OSError):
            return 0
        self._position += len(view)
        return len(view)

    def read_at(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``start`` on; raises DamagedFileError or OSError."""
        if self.failure is not None:
            raise self.failure
        try:
            self._read_verified(start, view)
        except (DamagedFileError, OSError) as error:
            self.failure = error
            raise

    def _read_verified(self, start: int, view: memoryview) -> None:
        is_header = start in self.headers and len(view) <= HEADER_BYTES and start // CHUNK_BYTES not in self._kept
        if self._digests is None or is_header:
            self._fill(start, view)
            return
        done = 0
        while done < len(view):
            chunk, offset = divmod(start + done, CHUNK_BYTES)
            count = min(len(view) - done, CHUNK_BYTES - offset)
            self._read_of_chunk(chunk, offset, view[done : done + count])
            done += count

    def verify_all(self) -> None:
        """Read all chunks; raises DamagedFileError."""
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for start in range(0, self.size, CHUNK_BYTES):
            self.read_at(start, buffer[: self.size - start])

    def _read_of_chunk(self, chunk: int, offset: int, view: memoryview) -> None:
        begin = chunk * CHUNK_BYTES
        numel = min(CHUNK_BYTES, self.size - begin)
        if len(view) == numel:
            self._fill(begin, view)
            self._verify(chunk, view)
            return
        whole = self._kept.pop(chunk, None)
        if whole is None:
            whole = bytearray(numel)
            self._fill(begin, memoryview(whole))
            self._verify(chunk, whole)
            passing = [each for each in self._kept if each not in self._lasting]
            if len(passing) >= KEPT_CHUNKS:
                self._kept.pop(passing[0])
        self._kept[chunk] = whole
        view[:] = memoryview(whole)[offset : offset + len(view)]

    def _verify(self, chunk: int, data: bytearray | memoryview) -> None:
        if chunk in self._verified or self._digests is None:
            return
        if digest_of(data) != self._digests.chunks[chunk]:
            begin = chunk * CHUNK_BYTES
            message = f"bytes {begin:,} to {begin + len(data):,} are not those that were written"
            raise DamagedFileError(self.path, chunk, message)
        self._verified.add(chunk)

    def _fill(self, start: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], start + done)
            if count == 0:
                raise OSError(f"{self.path} ends at {start + done:,} of {start + len(view):,} bytes")
            done += count
        self.bytes_read += len(view)

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def damages(folder: Path, files: Mapping[str, FileDigests]) -> Iterator[DamagedFileError]:
    """Read ``files`` in ``folder`` whole; yield the error of each that its digests contradict. Raises OSError."""
    for name, digests in files.items():
        with VerifiedReader(folder / name, digests) as reader:
            try:
                reader.verify_all()
            except DamagedFileError as error:
                yield error
