"""Bytes of files as training data: what is found, held out, shuffled and dealt to the ranks."""

import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import byte_data  # noqa: E402
from byte_data import BatchShape, ByteText, DataError, SourceFile, TrainingBatches, ValidationBatches  # noqa: E402


def write_files(folder: Path, sizes: list[int]) -> ByteText:
    """Files whose bytes count upwards without a break, so that a window shows where it was read."""
    folder.mkdir(exist_ok=True)
    position = 0
    for number, size in enumerate(sizes):
        (folder / f"{number:03}.bin").write_bytes(bytes((position + i) % 251 for i in range(size)))
        position += size
    return ByteText(byte_data.find_files([str(folder)]))


def test_text_is_read_across_files(tmp_path, monkeypatch):
    monkeypatch.setattr(byte_data, "OPEN_FILES_MAX", 2)
    text = write_files(tmp_path / "data", [3, 1, 7, 2, 20])
    assert len(text) == 33
    for start in range(33):
        for length in range(34 - start):
            assert text.read(start, length) == bytes(i % 251 for i in range(start, start + length))
    with pytest.raises(IndexError):
        text.read(30, 4)


def test_found_files_are_sorted_and_neither_empty_nor_hidden_nor_twice(tmp_path):
    for name in ("b/z.txt", "a.txt", "b/.hidden", ".git/x", "empty"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty" else "text")
    found = byte_data.find_files([str(tmp_path), str(tmp_path / "a.txt")])
    assert [file.name for file in found] == ["a.txt", "b/z.txt"]


def test_the_standard_library_is_there_without_installed_packages():
    names = {file.name for file in byte_data.standard_library()}
    assert "argparse.py" in names
    assert not [name for name in names if "site-packages" in name]


def source_files(names) -> list[SourceFile]:
    return [SourceFile(Path("/somewhere", name), name, 10) for name in names]


@given(st.sets(st.from_regex(r"[a-f]{1,4}(/[a-f]{1,3})?", fullmatch=True), min_size=2, max_size=60))
def test_split_keeps_every_file_once_and_both_sides_filled(names):
    files = source_files(sorted(names))
    train, held_out = byte_data.split_files(files)
    assert sorted([*train, *held_out], key=str) == sorted(files, key=str)
    assert train and held_out


@given(st.text("xyz", min_size=1, max_size=8))
def test_split_moves_no_file_when_one_is_added(added):
    files = source_files(f"module_{i}.py" for i in range(200))
    before = byte_data.split_files(files)
    after = byte_data.split_files([*files, *source_files([added])])
    for side_before, side_after in zip(before, after, strict=True):
        assert [file for file in side_after if file.name != added] == side_before


def test_split_holds_out_about_one_in_twenty():
    _train, held_out = byte_data.split_files(source_files(f"module_{i}.py" for i in range(4000)))
    assert 150 < len(held_out) < 250
    assert byte_data.split_files(source_files(["only"])) == (source_files(["only"]), [])


@given(st.integers(1, 400), st.integers(0, 2**64))
def test_shuffle_is_a_bijection(count, key):
    assert sorted(byte_data.shuffled(i, count, key) for i in range(count)) == list(range(count))


def test_shuffle_depends_on_its_key():
    orders = {tuple(byte_data.shuffled(i, 50, key) for i in range(50)) for key in range(20)}
    assert len(orders) == 20


@pytest.fixture(scope="module")
def long_text(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("text") / "data", [1000, 37, 4000, 1])


shapes = st.builds(BatchShape, st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 4]))


@settings(deadline=None)
@given(shapes, st.integers(0, 30), st.integers(0, 5))
def test_ranks_together_get_the_one_rank_batch_each_a_part_of_its_own(long_text, shape, step, seed):
    split = TrainingBatches(long_text, 16, shape, seed)
    alone = TrainingBatches(long_text, 16, BatchShape(shape.micro_batch * shape.dp_size, shape.accumulation, 1), seed)
    for micro in range(shape.accumulation):
        numbers = [list(split.samples(step, micro, rank)) for rank in range(shape.dp_size)]
        assert [*chain(*numbers)] == list(alone.samples(step, micro, 0))  # in order, so none twice
        rows = [split.batch(step, micro, rank) for rank in range(shape.dp_size)]
        np.testing.assert_array_equal(np.concatenate(rows), alone.batch(step, micro, 0))


def test_an_epoch_repeats_no_byte_and_the_next_is_cut_elsewhere(long_text):
    batches = TrainingBatches(long_text, 16, BatchShape(1, 1, 1), seed=3)
    count = batches.windows_per_epoch
    epochs = [sorted(batches.window_start(epoch * count + i) for i in range(count)) for epoch in range(4)]
    for starts in epochs:
        assert np.all(np.diff(starts) == 16)
        assert starts[0] >= 0 and starts[-1] + 16 <= len(long_text)
    assert len({starts[0] for starts in epochs}) > 1
    first = [batches.window_start(i) for i in range(count)]
    assert first != sorted(first)


@given(st.integers(2, 40), st.integers(0, 100))
def test_any_text_as_long_as_a_sequence_will_do(seq_len, spare):
    text = ByteText([SourceFile(Path("/none"), "none", seq_len + spare)])
    batches = TrainingBatches(text, seq_len, BatchShape(1, 1, 1), seed=0)
    for sample in range(3 * batches.windows_per_epoch):
        assert 0 <= batches.window_start(sample) <= len(text) - seq_len


@given(st.integers(1, 40), st.integers(1, 3), st.sampled_from([1, 2, 4]))
@settings(deadline=None)
def test_validation_counts_every_window_once_whatever_the_ranks(long_text, wanted, micro_batch, dp_size):
    batches = ValidationBatches(long_text, 16, wanted, BatchShape(micro_batch, 1, dp_size))
    seen = []
    for round_number in range(batches.rounds):
        for rank in range(dp_size):
            rows, valid = batches.batch(round_number, rank)
            assert rows.shape == (micro_batch, 16)
            seen += [bytes(row) for row in rows[:valid]]
    alone = ValidationBatches(long_text, 16, wanted, BatchShape(wanted, 1, 1)).batch(0, 0)[0]
    assert seen == [bytes(row) for row in alone]


def test_a_file_that_shrank_is_named(tmp_path):
    text = write_files(tmp_path / "data", [100])
    (tmp_path / "data" / "000.bin").write_bytes(b"short")
    with pytest.raises(DataError, match=r"000.bin changed while training: 100 bytes before, 5 now"):
        text.read(0, 10)


def test_unreadable_file(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("text")

    def refuse(*_args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root, who may run the tests, can read anything
    with pytest.raises(DataError, match=r"cannot read .*a: Permission denied"):
        byte_data.find_files([str(tmp_path / "a")])
