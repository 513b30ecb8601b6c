"""examples/pretrain.py under the real launchers: killed, stopped, out of disk, and resumed."""

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
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import checkpoints  # noqa: E402

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
        shutil.copy(ROOT / "tests" / "support" / "pretrain_ds.json", config)
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
