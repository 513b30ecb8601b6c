"""A profile in the life of a run: the slow rank on each axis, and all that can go wrong with a window."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from small_engines import engine_of, llama, step
from test_cost import calls_of_ds_npu

from ds_npu.features.profile import profiled_steps, recorders
from ds_npu.step_time.intervals import BUBBLE, WAITS
from ds_npu.step_time.profile_folder import traces_in
from ds_npu.step_time.step_report import step_report

SLEEP = 0.5
AXES: dict[str, tuple[str, dict, int]] = {
    "tensor": ("llama", {"parallel": {"tensor": 2, "probe": False}}, 0),
    "data": ("llama", {}, 1),
    "context": ("llama", {"parallel": {"context": 2}}, 0),
    "expert": ("mixtral", {"parallel": {"expert": 2}}, 0),
    "pipeline": ("llama", {"parallel": {"pipeline": 2}}, 0),
    "all data ranks, ZeRO 3": ("llama", {}, 3),
}
"""The family, the section and the stage of ZeRO of two ranks."""


def slow_rank(folder: str, axis: str) -> None:
    """Train four steps, in which rank 1 sleeps in its first block; steps 1 and 2 are profiled on both ranks."""
    family, section, stage = AXES[axis]
    model = tiny_models.tiny(family, torch.float32)
    profile = {"steps": [1, 2], "ranks": "all", "folder": folder}
    engine = engine_of(model, {**section, "profile": profile}, stage)
    if dist.get_rank() == 1:
        layers = next(each for name, each in engine.module.named_modules() if name.endswith("model.layers"))
        layers[len(layers) - 1].register_forward_pre_hook(lambda *_: time.sleep(SLEEP))
    for _ in range(4):
        step(engine, tiny_models.tokens(2, 8))
    assert not [name for name in ("forward", "backward", "_take_model_step") if in_chain(engine, name)]


def in_chain(engine, name: str) -> bool:
    """Whether a profile still wraps the method ``name``."""
    found = vars(engine).get(name)
    while hasattr(found, "wrapper"):
        if found.level.name == "PROFILE":
            return True
        found = found.inner
    return False


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize("axis", AXES)
def test_a_slow_rank_is_named(tmp_path, axis):
    run_on_ranks(2, slow_rank, str(tmp_path), axis)
    figures = json.loads((tmp_path / "report.json").read_text())
    micro_batches = 2 if axis == "pipeline" else 1
    asleep = SLEEP * micro_batches
    if axis == "pipeline":
        # Rank 1 has the last stage: the first one waits for its gradients.
        waits = figures["ranks"][0]["activities"][BUBBLE] / 2
    else:
        slowest = [each for each in figures["slowest_ranks"] if each["by_seconds"] > asleep / 2]
        assert slowest and {each["slowest"] for each in slowest} == {1}, figures["slowest_ranks"]
        # Ranks of experts meet as data ranks, too.
        named = "data" if axis in ("expert", "all data ranks, ZeRO 3") else axis
        assert named in slowest[0]["axes"], slowest
        mine = figures["ranks"][0]["activities"]
        waits = sum(time for name, time in mine.items() if name.startswith(WAITS)) / 2
    assert asleep * 0.8 < waits < figures["step_seconds"]
    for rank in figures["ranks"]:
        assert sum(rank["activities"].values()) == pytest.approx(rank["seconds"])
    # The command says what the run has said.
    again = step_report(traces_in(tmp_path))
    assert again.step_seconds == pytest.approx(figures["step_seconds"])
    assert again.shares() == pytest.approx(figures["shares"])


def lives(folder: str) -> None:
    """Everything in one world of one rank; each part in a folder of its own."""
    ids = tiny_models.tokens(2, 8)
    refused(folder)
    off_and_outside_nothing_is_called(f"{folder}/off", ids)
    operators_are_those_of_the_step(f"{folder}/operators", ids)
    beside_another_profiler(f"{folder}/beside", ids)
    another_profiler_in_the_window(f"{folder}/intruded", ids)
    a_full_disk(f"{folder}/full", ids)
    a_folder_that_is_gone(f"{folder}/gone", ids)
    resumed_in_the_window(f"{folder}/resumed", ids)
    resumed_behind_the_window(f"{folder}/behind", ids)


@contextmanager
def said():
    """Yields the list of what the log is told."""
    found: list[str] = []
    log = profiled_steps.logger()
    names = ("info", "warning", "error")
    before = [getattr(log, name) for name in names]
    for name in names:
        setattr(log, name, lambda *words: found.append(words[0] % words[1:]))
    try:
        yield found
    finally:
        for name, each in zip(names, before, strict=True):
            setattr(log, name, each)


def refused(folder: str) -> None:
    Path(folder, "file").write_text("")
    with pytest.raises(ValueError, match=r"ds_npu\.profile\.folder: .*no profile can be written there"):
        engine_of(llama(), {"profile": {"steps": [0, 1], "folder": f"{folder}/file/profile"}})
    with pytest.raises(ValueError, match=r"ds_npu\.profile\.ranks: found \[1\]; the ranks of this world are 0 to 0"):
        engine_of(llama(), {"profile": {"steps": [0, 1], "ranks": [0, 1], "folder": folder}})


def off_and_outside_nothing_is_called(folder: str, ids: torch.Tensor) -> None:
    """Neither without the key nor behind the window is a function of the profile called."""
    counts = []
    for section in ({}, {"profile": {"steps": [0, 0], "folder": folder}}):
        engine = engine_of(llama(), section)
        for _ in range(2):
            step(engine, ids)
        with calls_of_ds_npu() as called:
            step(engine, ids)
        assert not [name for name in called if "profile" in name or "step_time" in name], called
        counts.append(sum(called.values()))
    assert counts[0] == counts[1], counts


def operators_are_those_of_the_step(folder: str, ids: torch.Tensor) -> None:
    """Calls of products in the trace are those that a mode of torch counts in the same step of the same model."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.products += func.overloadpacket._qualified_op_name in ("aten::mm", "aten::addmm", "aten::bmm")
            return func(*args, **(kwargs or {}))

    engine = engine_of(llama(), {"profile": {"steps": [1, 2], "folder": folder}})
    for _ in range(3):
        step(engine, ids)
    with Counts() as counts:
        step(engine, ids)
    figures = json.loads(Path(folder, "report.json").read_text())
    products = sum(each["calls"] for each in figures["operators"] if each["kind"] == "products")
    assert products == 2 * counts.products > 0
    reached = [each for each in figures["operators"] if each["kind"] == "products"]
    assert all(0 < each["least_seconds"] < each["known_seconds"] for each in reached), reached


def beside_another_profiler(folder: str, ids: torch.Tensor) -> None:
    engine = engine_of(llama(), {"profile": {"steps": [1, 1], "folder": folder}})
    with torch.profiler.profile(), pytest.raises(RuntimeError, match="another profiler runs already"):
        step(engine, ids)


def another_profiler_in_the_window(folder: str, ids: torch.Tensor) -> None:
    engine = engine_of(llama(), {"profile": {"steps": [1, 3], "folder": folder}})
    with said() as words:
        for index in range(4):
            if index == 2:
                with torch.profiler.profile():
                    step(engine, ids)
            else:
                step(engine, ids)
    assert len(words) == 1 and "another profiler was started in the window" in words[0], words
    assert not Path(folder, "report.txt").exists()


def a_full_disk(folder: str, ids: torch.Tensor) -> None:
    engine = engine_of(llama(), {"profile": {"steps": [1, 1], "folder": folder}})
    usage = recorders.shutil.disk_usage
    try:
        recorders.shutil.disk_usage = lambda path: usage(path)._replace(free=10)
        with said() as words:
            for _ in range(3):
                step(engine, ids)
    finally:
        recorders.shutil.disk_usage = usage
    assert engine.global_steps == 3 and len(words) == 1, words
    assert "no profile of rank 0" in words[0] and "0 MiB are free there. What to do: profile fewer steps" in words[0]
    assert not list(Path(folder).iterdir())


def a_folder_that_is_gone(folder: str, ids: torch.Tensor) -> None:
    engine = engine_of(llama(), {"profile": {"steps": [1, 1], "folder": folder}})
    with said() as words:
        for index in range(3):
            if index == 1:
                Path(folder).rmdir()
            step(engine, ids)
    assert engine.global_steps == 3 and len(words) == 1 and "no profile of rank 0" in words[0], words


def resumed_in_the_window(folder: str, ids: torch.Tensor) -> None:
    engine = engine_of(llama(), {})
    for _ in range(3):
        step(engine, ids)
    engine.save_checkpoint(f"{folder}/checkpoint")
    again = engine_of(llama(), {"profile": {"steps": [2, 4], "folder": folder}})
    again.load_checkpoint(f"{folder}/checkpoint")
    with said() as words:
        for _ in range(2):
            step(again, ids)
    assert "found 2 to 4, and this run goes on at step 3: only steps 3 to 4 are recorded" in words[0], words
    assert json.loads(Path(folder, "report.json").read_text())["steps"] == [3, 4]


def resumed_behind_the_window(folder: str, ids: torch.Tensor) -> None:
    again = engine_of(llama(), {"profile": {"steps": [0, 1], "folder": folder}})
    again.load_checkpoint(f"{Path(folder).parent}/resumed/checkpoint")
    with said() as words:
        for _ in range(2):
            step(again, ids)
    assert len(words) == 1 and "no step of the window came" in words[0], words


@pytest.mark.slow
def test_a_window_in_the_life_of_a_run(tmp_path):
    run_on_ranks(1, lives, str(tmp_path))


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
import small_engines, tiny_models
engine = small_engines.engine_of(small_engines.llama(), {{"profile": {{"steps": {steps}, "folder": {folder!r}}}}})
for _ in range(3):
    small_engines.step(engine, tiny_models.tokens(2, 8))
"""


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[5, 6], [1, 6]])
def test_steps_that_never_come_are_one_message(tmp_path, steps):
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "support"), str(here.parent)]
    script = SCRIPT.format(paths=paths, steps=steps, folder=str(tmp_path))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = [line for line in ran.stderr.splitlines() if "ds_npu.profile.steps" in line]
    assert len(lines) == 1 and "never came: the run ended behind step 2" in lines[0], ran.stderr
    if steps[0] == 1:
        assert "steps 3 to 6 never came" in lines[0]
        assert traces_in(tmp_path)[0].header.steps == (1, 2)
