"""The main job of the foundation: byte data, checkpoints, and examples/pretrain.py under the real launchers."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import byte_data  # noqa: E402
import checkpoints  # noqa: E402
import pretrain  # noqa: E402
from byte_data import BatchShape, ByteText, DataError, SourceFile, TrainingBatches, ValidationBatches  # noqa: E402

# ---- data ----


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


@given(st.sets(st.text("abcdef/", min_size=1, max_size=8), min_size=2, max_size=60))
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


# ---- checkpoints on disk ----


def make_checkpoint(folder: Path, step: int) -> Path:
    path = folder / checkpoints.tag_of(step)
    path.mkdir(parents=True)
    (path / "weights.pt").write_bytes(b"x" * 100)
    files = {"weights.pt": 100}
    (path / checkpoints.MANIFEST).write_text(json.dumps({"step": step, "identity": {}, "files": files}))
    return path


def spoil(folder: Path, how: str) -> None:
    """Leave behind what a death during a save, or a careless hand, leaves behind."""
    path = make_checkpoint(folder, 30)
    if how == "partial":
        path.rename(path.with_name(path.name + checkpoints.PARTIAL))
    elif how == "truncated":
        (path / "weights.pt").write_bytes(b"x" * 99)
    elif how == "file missing":
        (path / "weights.pt").unlink()
    elif how == "no manifest":
        (path / checkpoints.MANIFEST).unlink()
    elif how == "half a manifest":
        (path / checkpoints.MANIFEST).write_text('{"step": 30, "fil')
    (folder / "latest").write_text(path.name)


@pytest.mark.parametrize("how", ["partial", "truncated", "file missing", "no manifest", "half a manifest"])
def test_only_a_whole_checkpoint_is_chosen(tmp_path, how):
    make_checkpoint(tmp_path, 9)
    whole = make_checkpoint(tmp_path, 20)
    spoil(tmp_path, how)
    assert checkpoints.choose(tmp_path, required=True) == whole
    shutil.rmtree(whole)
    assert checkpoints.choose(tmp_path, required=True).name == checkpoints.tag_of(9)


def test_resume_without_a_checkpoint(tmp_path):
    spoil(tmp_path, "truncated")
    assert checkpoints.choose(tmp_path, required=False) is None
    with pytest.raises(pretrain.RunError, match="no complete checkpoint"):
        checkpoints.choose(tmp_path, required=True)


def test_differences_name_the_key_and_pass_over_what_cannot_matter():
    saved = {"--seed": 1, "deepspeed_config": {"steps_per_print": 1, "optimizer": {"type": "Adam"}}}
    now = {"--seed": 1, "deepspeed_config": {"steps_per_print": 9, "optimizer": {"type": "Lion"}}}
    assert checkpoints.differences(saved, saved) == []
    (line,) = checkpoints.differences(saved, now)
    assert line == "deepspeed_config.optimizer: {'type': 'Adam'} then, {'type': 'Lion'} now"


# ---- mistakes, seen before anything is started ----


def broken_json(folder: Path, name: str, **changes: object) -> str:
    values = json.loads((EXAMPLES / "configs" / name).read_text()) | changes
    path = folder / name
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return str(path)


MISTAKES = {
    "no such data": (lambda t: ["--data", str(t / "none")], "there is no such file or folder"),
    "empty folder": (lambda t: ["--data", str(t)], "holds no file with a byte in it"),
    "too short": (
        lambda t: ["--data", __file__, "--seq-len", "999999", "--model", long_model(t)],
        "fewer than --seq-len",
    ),
    "no such model": (lambda t: ["--model", str(t / "none.json")], "No such file"),
    "not json": (lambda t: ["--model", __file__], "is not JSON"),
    "no model type": (lambda t: ["--model", broken_json(t, "gpt2-tiny.json", model_type=None)], 'no "model_type"'),
    "strange model": (lambda t: ["--model", broken_json(t, "gpt2-tiny.json", model_type="zzz")], "Unrecognized model"),
    "vocabulary": (lambda t: ["--model", broken_json(t, "gpt2-tiny.json", vocab_size=255)], "bytes need at least 256"),
    "positions": (lambda t: ["--seq-len", "5000"], "longer than the 1024 positions"),
    "no optimizer": (
        lambda t: ["--deepspeed_config", broken_json(t, "demo.json", optimizer=None)],
        'has no "optimizer" section',
    ),
    "no ds config": (lambda t: ["--deepspeed_config", str(t / "none")], "No such file"),
    "resume from nowhere": (lambda t: ["--resume"], "--resume needs --save DIR"),
    "zero steps": (lambda t: ["--steps", "0"], "not a whole number above 0"),
    "unknown option": (lambda t: ["--sepps", "1"], "unrecognized arguments: --sepps 1"),
}


def long_model(folder: Path) -> str:
    return broken_json(folder / "..", "llama-tiny.json", max_position_embeddings=10**7)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gives_one_line_and_status_2(name, tmp_path, monkeypatch, capsys):
    arguments, expected = MISTAKES[name]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *arguments(tmp_path)])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    # A mistake that is not noticed must fail here, not open a process group.
    monkeypatch.setattr(pretrain, "join_world", lambda: pytest.fail("the mistake was not noticed"))
    assert pretrain.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and expected in line


def test_unreadable_file(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("text")

    def refuse(*_args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root, who may run the tests, can read anything
    with pytest.raises(DataError, match=r"cannot read .*a: Permission denied"):
        byte_data.find_files([str(tmp_path / "a")])


def test_shipped_configs_are_valid():
    for path in sorted((EXAMPLES / "configs").glob("*.json")):
        values = json.loads(path.read_text())
        if "model_type" in values:
            assert pretrain.read_model_config(path, 128).vocab_size == 256
        else:
            assert values["train_micro_batch_size_per_gpu"] > 0 and "optimizer" in values


# ---- real runs ----

TIMEOUT_SECONDS = 150


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Job:
    """A run of pretrain.py on a very small model with dropout, in a session of its own that ends with the block."""

    def __init__(self, folder: Path, name: str, launcher: str = "deepspeed") -> None:
        self.folder, self.name, self.launcher = folder, name, launcher
        self.log = folder / f"{name}.log"
        self.numbers = folder / f"{name}.jsonl"
        data = folder / "data"
        if not data.exists():
            data.mkdir()
            for source in ("argparse.py", "ast.py", "json/decoder.py", "shutil.py"):
                shutil.copy(Path(os.__file__).parent / source, data)

    def start(self, *arguments: object, file_size_limit: int | None = None) -> "Job":
        python, port = sys.executable, free_port()
        start = {
            "deepspeed": [python, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port],
            "torchrun": [python, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port],
            "python": [python],
        }[self.launcher]
        config = self.folder / "ds.json"
        shutil.copy(ROOT / "tests" / "pretrain_ds.json", config)
        command = [*start, EXAMPLES / "pretrain.py", "--deepspeed", "--deepspeed_config", config]
        command += ["--model", EXAMPLES / "configs" / "gpt2-tiny.json", "--data", self.folder / "data"]
        command += ["--seq-len", 32, "--log-every", 1, "--numbers", self.numbers, "--eval-windows", 8, *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(self.folder / "extensions")}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            environment.pop(name, None)

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size_limit, file_size_limit))

        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                # A pipe, since a limit on file size must not stop the log.
                stdout=log if file_size_limit is None else subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=limit if file_size_limit else None,
            )
        return self

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_error: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finish(self) -> int:
        """Wait for the command and everything it started; returns its status."""
        if self.process.stdout is not None:
            output, _ = self.process.communicate(timeout=TIMEOUT_SECONDS)
            self.log.write_bytes(output)
        status = self.process.wait(timeout=TIMEOUT_SECONDS)
        self.wait_for(lambda: not self.alive(), "the ranks to end")
        return status

    def alive(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def wait_for(self, condition, what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited too long for {what}:\n{self.text()[-3000:]}"
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        def there() -> bool:
            assert self.process.poll() is None, self.text()
            return self.numbers.exists() and max(self.losses(), default=0) >= step

        self.wait_for(there, f"step {step}")

    def text(self) -> str:
        return self.log.read_text()

    def lines(self, key: str) -> dict[int, object]:
        entries = [json.loads(line) for line in self.numbers.read_text().split("\n")[:-1]]
        return {entry["step"]: entry[key] for entry in entries if key in entry}

    def losses(self) -> dict[int, object]:
        return self.lines("loss")

    def run(self, *arguments: object, **options: object) -> int:
        with self.start(*arguments, **options):
            return self.finish()


@pytest.mark.slow
def test_a_killed_run_resumed_gives_the_same_losses_to_the_last_bit(tmp_path):
    save = tmp_path / "saved"
    killed = Job(tmp_path, "killed")
    with killed.start("--steps", 10**6, "--save", save, "--save-every", 3, "--eval-every", 5):
        killed.wait_for_step(8)
        os.killpg(killed.process.pid, signal.SIGKILL)
        assert killed.finish() == -signal.SIGKILL
    newest = checkpoints.choose(save, required=True)
    done = checkpoints.read_manifest(newest)["step"]
    # As if the next two saves had been cut short as well.
    shutil.copytree(newest, save / checkpoints.tag_of(done + 3))
    cut = next((save / checkpoints.tag_of(done + 3)).glob("*optim_states.pt"))
    os.truncate(cut, cut.stat().st_size // 2)
    (save / (checkpoints.tag_of(done + 6) + checkpoints.PARTIAL)).mkdir()
    (save / "latest").write_text(checkpoints.tag_of(done + 3))

    resumed, whole = Job(tmp_path, "resumed"), Job(tmp_path, "whole")
    steps = done + 7
    ended = resumed.run("--steps", steps, "--save", save, "--save-every", 3, "--eval-every", 5, "--resume")
    assert ended == 0, resumed.text()
    assert whole.run("--steps", steps, "--eval-every", 5) == 0, whole.text()
    expected = whole.losses()
    assert sorted(expected) == list(range(1, steps + 1))
    assert (
        killed.losses() == {step: expected[step] for step in killed.losses() if step in expected}
        or max(killed.losses()) > steps
    )
    assert resumed.losses() == {step: expected[step] for step in range(done + 1, steps + 1)}
    held_out = whole.lines("validation_loss")
    assert resumed.lines("validation_loss") == {step: held_out[step] for step in held_out if step > done}
    left = sorted(path.name for path in save.iterdir() if path.is_dir())
    assert len(left) == 2 and left[-1] == checkpoints.tag_of(steps) == (save / "latest").read_text()


@pytest.mark.slow
def test_ctrl_c_saves_and_the_run_goes_on_under_torchrun(tmp_path):
    save = tmp_path / "saved"
    job = Job(tmp_path, "stopped")
    with job.start("--steps", 10**6, "--save", save, "--save-every", 0, "--eval-every", 0):
        job.wait_for_step(3)
        os.killpg(job.process.pid, signal.SIGINT)  # what a terminal does
        job.finish()
    newest = checkpoints.choose(save, required=True)
    done = checkpoints.read_manifest(newest)["step"]
    assert f"Stopped at step {done} of 1000000 by a signal" in job.text()
    assert [path for path in save.iterdir() if path.is_dir()] == [newest]
    later = Job(tmp_path, "later", "torchrun")
    assert later.run("--steps", done + 2, "--save", save, "--eval-every", 0, "--resume") == 0, later.text()
    assert sorted(later.losses()) == [done + 1, done + 2]


@pytest.mark.slow
def test_plain_python_and_a_disk_that_takes_no_more(tmp_path):
    save = tmp_path / "saved"
    first = Job(tmp_path, "first", "python")
    assert first.run("--steps", 2, "--save", save) == 0, first.text()
    newest = checkpoints.choose(save, required=True)
    full = Job(tmp_path, "full", "python")
    assert full.run("--steps", 4, "--save", save, "--resume", file_size_limit=100_000) != 0
    errors = [line for line in full.text().splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "cannot write a checkpoint" in errors[0], full.text()
    assert "Traceback" not in full.text()
    assert checkpoints.complete_checkpoints(save) == [newest]
    other = Job(tmp_path, "other", "python")
    assert other.run("--steps", 4, "--save", save, "--resume", "--seed", 1) == 2
    assert "--seed: 0 then, 1 now" in other.text()
    assert other.run("--steps", 4, "--save", save) == 2
    assert "already holds checkpoints" in other.text()


@pytest.mark.slow
def test_a_mistake_under_the_launcher_is_told_once(tmp_path):
    (tmp_path / "no-folder").write_text("a file where the folder should be")
    job = Job(tmp_path, "wrong")
    assert job.run("--steps", 2, "--save", tmp_path / "no-folder" / "below") != 0
    errors = [line for line in job.text().splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "cannot write a checkpoint" in errors[0], job.text()
    assert "Traceback" not in job.text()
