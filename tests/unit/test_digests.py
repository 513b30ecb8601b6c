"""Digests of chunks against hashlib on whole chunks, flipped bytes, and tensors that are read in part."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from typing import Any

import pytest
import torch

from ds_npu.checkpoint import digests
from ds_npu.checkpoint.contents import CheckpointFiles, tensors_in
from ds_npu.checkpoint.digests import DamagedFileError, DigestedWriter, FileDigests, VerifiedReader
from ds_npu.checkpoint.files import CheckpointError, host_memory

CHUNK = 4096


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(digests, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(digests, "SMALL_BYTES", 1000)


def written(path, pieces) -> FileDigests:
    with DigestedWriter(path) as writer:
        assert [writer.write(each) for each in pieces] == [len(each) for each in pieces]
    return writer.digests()


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 77])
def test_digests_are_those_of_whole_chunks(size, tmp_path):
    draw = random.Random(size)
    data, pieces, at = draw.randbytes(size), [], 0
    while at < size:
        pieces.append(data[at : at + draw.choice([1, 30, 999, 1000, 3 * CHUNK])])
        at += len(pieces[-1])
    found = written(tmp_path / "file", pieces)
    chunks = [hashlib.sha256(data[at : at + CHUNK]).hexdigest()[:32] for at in range(0, size, CHUNK)]
    assert (tmp_path / "file").read_bytes() == data
    assert found == FileDigests(size, tuple(chunks))
    with VerifiedReader(tmp_path / "file", found) as reader:
        assert reader.read() == data and reader.bytes_read == size


def test_memory_that_changes_behind_a_write(tmp_path, monkeypatch):
    """Threads that are late write and hash what they were given: of a buffer that is used again, and of tensors."""

    def late(action):
        def acts(self, pieces) -> None:
            time.sleep(0.01)
            action(self, pieces)

        return acts

    for name in ("_hash", "_write_all"):
        monkeypatch.setattr(DigestedWriter, name, late(getattr(DigestedWriter, name)))
    monkeypatch.setattr(digests, "FLUSHED_BYTES", 3 * CHUNK)
    draw, again, every = random.Random(5), bytearray(2 * CHUNK), b""
    with DigestedWriter(tmp_path / "file", host_memory(CONTENT)) as writer:
        for size in (2000, 5, 2 * CHUNK, 999):
            again[:size] = draw.randbytes(size)
            every += again[:size]
            writer.write(memoryview(again)[:size])
        file: Any = writer
        torch.save(CONTENT, file)
    data = (tmp_path / "file").read_bytes()
    assert data.startswith(every) and len(data) > len(every)
    (tmp_path / "archive.pt").write_bytes(data[len(every) :])
    found = torch.load(tmp_path / "archive.pt")
    assert all(map(torch.equal, *[[each for _, each in tensors_in(content)] for content in (found, CONTENT)]))
    assert writer.digests() == digests.digests_of((tmp_path / "file").read_bytes())


def test_a_disk_that_is_full_behind_a_write(tmp_path, monkeypatch):
    """What a thread fails with is raised, and no byte behind it is written."""
    wrote = os.write

    def write(descriptor: int, view: memoryview) -> int:
        if os.fstat(descriptor).st_size > 2 * CHUNK:
            raise OSError(28, "No space left on device")
        return wrote(descriptor, view)

    data = bytearray(4 * CHUNK)
    lasting = {digests._address(memoryview(data)): len(data)}
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "write", write)
        with DigestedWriter(tmp_path / "file", lasting) as writer:
            writer.write(data)
    assert (tmp_path / "file").stat().st_size == 3 * CHUNK
    assert not [each for each in threading.enumerate() if "ds_npu_digests" in each.name]


def test_chunks_that_are_read_in_turns_are_read_once(tmp_path):
    """A master and both moments of many small weights, in three parts of a file."""
    data = random.Random(1).randbytes(12 * CHUNK)
    found, part, step = written(tmp_path / "file", [data]), 4 * CHUNK, CHUNK // 4 + 8
    with VerifiedReader(tmp_path / "file", found) as reader:
        for start in range(0, part, step):
            for begin in (start, part + start, 2 * part + start):
                buffer = bytearray(min(step, part - start))
                reader.read_at(begin, memoryview(buffer))
                assert buffer == data[begin : begin + len(buffer)]
        assert reader.bytes_read == len(data)


def test_no_chunk_of_a_partition_is_read_twice(tmp_path):
    """Three records of a file share chunks at their ends, which all others are read between."""
    numel = 10 * CHUNK // 4 + 500
    partition = {name: torch.rand(numel) for name in ("master", "exp_avg", "exp_avg_sq")}
    with DigestedWriter(tmp_path / "file.pt") as writer:
        torch.save(partition, writer)
    digests = writer.digests()
    files = CheckpointFiles(tmp_path, (), lambda name: digests)
    found, step = files.named("file.pt"), CHUNK // 4 + 8
    for start in range(0, numel, step):
        for name, value in partition.items():
            count = min(step, numel - start)
            assert files.elements("file.pt", found[name], start, count).equal(value[start : start + count])
    directory_and_headers = 2 * CHUNK + 100
    assert digests.size <= files.bytes_read <= digests.size + directory_and_headers
    files.close()


CONTENT = {
    "module": {"a": torch.arange(3000.0), "b": torch.arange(12).view(3, 4).t(), "c": torch.empty(0, 3)},
    "count": 7,
    "state": [torch.arange(5000, dtype=torch.bfloat16), {"step": torch.tensor(3.0)}],
}


def test_every_flipped_byte_is_found_or_not_read(tmp_path):
    """Values of one tensor are right, or the read is refused, whatever byte of the file is flipped."""
    path = tmp_path / "file.pt"
    with DigestedWriter(path) as writer:
        torch.save(CONTENT, writer)
    known, data = writer.digests(), path.read_bytes()
    refused = 0
    for at in random.Random(3).sample(range(len(data)), 150):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        files = CheckpointFiles(tmp_path, (), lambda name: known)
        try:
            found = files.named("file.pt")
            assert files.elements("file.pt", found["module"]["a"], 10, 90).equal(torch.arange(10.0, 100.0))
        except DamagedFileError as error:
            assert error.chunk is None or error.span[0] <= at < error.span[1]
            refused += 1
        finally:
            files.close()
        with pytest.raises(DamagedFileError), VerifiedReader(path, known) as reader:
            reader.verify_all()
        with pytest.raises(DamagedFileError):
            CheckpointFiles(tmp_path, (), lambda name: known).whole("file.pt")
    assert 20 < refused < 140


def test_elements_are_those_of_torch(tmp_path):
    path = tmp_path / "file.pt"
    for is_archive in (True, False):
        with DigestedWriter(path) as writer:
            torch.save(CONTENT, writer, _use_new_zipfile_serialization=is_archive)
        files = CheckpointFiles(tmp_path, (), lambda name: writer.digests())
        content, plain = files.named("file.pt"), torch.load(path)
        assert content["count"] == 7
        for (keys, one), (same, other) in zip(tensors_in(content), tensors_in(plain), strict=True):
            assert keys == same and files.elements("file.pt", one).equal(other.reshape(-1))
            assert files.elements("file.pt", one, one.numel() // 2, 1).equal(other.reshape(-1)[one.numel() // 2 :][:1])
        whole = files.with_values("file.pt", content)
        assert all(map(torch.equal, *[[each for _, each in tensors_in(found)] for found in (whole, plain)]))
        assert whole["module"]["c"].shape == (0, 3)
        files.close()


def test_files_that_are_cut_short(tmp_path):
    path = tmp_path / "file.pt"
    with DigestedWriter(path) as writer:
        torch.save(CONTENT, writer)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match=r"it has [\d,]+ bytes, and [\d,]+ were written"):
        CheckpointFiles(tmp_path, (), lambda name: writer.digests()).named("file.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        CheckpointFiles(tmp_path, ()).named("file.pt")
