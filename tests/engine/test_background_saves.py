"""``checkpoint.asynchronous``: what is saved behind training, by slow writers, by writers that fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import background_lives as lives
import pytest
import trainer_runs
from ranks import run_on_ranks
from transformers import trainer

from ds_npu.checkpoint.wholeness import checkpoints_in, newest_whole, verify
from ds_npu.engine.checkpoints.background_saves import BackgroundSaves

SCRIPT = Path(lives.__file__).with_name("background_script.py")


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize("cases", [[0, 2], [1], [3], [4], [5]], ids=str)
def test_a_save_behind_training_holds_what_one_that_blocks_holds(cases, tmp_path):
    run_on_ranks(2, lives.life, str(tmp_path), cases, deadline_s=400.0)


@pytest.mark.slow
def test_slow_writers_and_writers_that_fail(tmp_path):
    run_on_ranks(2, lives.slow_writers, str(tmp_path), deadline_s=400.0)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["wait", "error", "end"])
def test_a_process_that_ends_while_it_saves(end, tmp_path):
    """At its end, after an error and after SIGTERM it writes what it has begun."""
    environ = os.environ | {"DS_ACCELERATOR": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    command = [sys.executable, str(SCRIPT), str(tmp_path), end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ) as script:
        lines = iter(script.stdout.readline, "")
        said = [next(lines)]
        while "saving\n" not in said:
            said.append(next(lines))
        if end == "wait":
            script.send_signal(signal.SIGTERM)
        said += lines
        code = script.wait(100)
    assert code == {"wait": -signal.SIGTERM, "error": 1, "end": 0}[end], said
    assert newest_whole(tmp_path) == tmp_path / "global_step1" and (tmp_path / "latest").exists(), said
    assert not list(tmp_path.rglob("*.unfinished"))


def test_the_last_whole_checkpoint_stays_until_the_next_one_is_saved(tmp_path):
    """The Trainer's own removal, with a writer that waits, and with one that fails."""
    for is_saved in (True, False):
        folder = tmp_path / f"{is_saved}"
        checkpoints = [folder / "checkpoint-1", folder / "checkpoint-2"]
        for each in checkpoints:
            each.mkdir(parents=True)
        gate, saves = threading.Event(), BackgroundSaves("cpu", 10.0)

        def write(gate=gate, is_saved=is_saved) -> None:
            assert gate.wait(10.0)
            if not is_saved:
                raise RuntimeError("the disk is full")

        saves.begin(checkpoints[1] / "global_step2", write)
        removal = threading.Thread(target=trainer.rotate_checkpoints, args=(str(folder), 1))
        removal.start()
        trainer.rotate_checkpoints(str(tmp_path / "elsewhere"), 1)
        removal.join(0.3)
        assert removal.is_alive() and checkpoints[0].exists()
        gate.set()
        removal.join(10.0)
        assert checkpoints[0].exists() is not is_saved and checkpoints[1].exists()
        with nullcontext() if is_saved else pytest.raises(RuntimeError, match="the disk is full"):
            saves.wait()


@pytest.mark.slow
def test_a_whole_run_of_the_trainer(tmp_path):
    """With save_total_limit 1: one checkpoint is left, it is whole, and a resumed run ends with the same weights."""
    given = {"lr_scheduler_type": "constant", "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    behind, limited = {"checkpoint": {"asynchronous": True}}, given | {"save_total_limit": 1}
    trainer_runs.run_trainer(tmp_path / "plain", 2, {}, given | {"save_strategy": "no"})
    trainer_runs.run_trainer(tmp_path / "behind", 2, behind, limited | {"max_steps": 5})
    assert [each.name for each in (tmp_path / "behind").glob("checkpoint-*")] == ["checkpoint-5"]
    found = next(checkpoints_in(tmp_path / "behind" / "checkpoint-5"))
    assert not found.problems and not verify(found) and not list(tmp_path.rglob("*.unfinished"))
    resumed = limited | {"resume_from_checkpoint": tmp_path / "behind" / "checkpoint-5"}
    trainer_runs.run_trainer(tmp_path / "behind", 2, behind, resumed)
    assert [each.name for each in (tmp_path / "behind").glob("checkpoint-*")] == ["checkpoint-6"]
    weights = [trainer_runs.weights_in(tmp_path / each) for each in ("plain", "behind")]
    assert trainer_runs.same(*weights)
