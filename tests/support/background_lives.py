"""Saves behind training: their files against those of saves that block, slow writers, errors, and what they leave."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import layout_lives as lives
import pytest
import torch
import torch.distributed as dist

from ds_npu.checkpoint.digests import DigestedWriter
from ds_npu.checkpoint.wholeness import newest_whole
from ds_npu.checkpoint.written import WrittenCheckpoint
from ds_npu.engine.checkpoints.written_files import CLASSES
from ds_npu.planner.parameter_bytes import saved_bytes_of_a_parameter

DEADLINE_S = 60.0
CASES: list[tuple[int, dict]] = [
    (1, {}),
    (3, {}),
    (0, {"parallel": {"tensor": 2}}),
    (2, {"parallel": {"pipeline": 2}}),
    (2, {"parallel": {"tensor": 2}}),
    (0, {}),
]


def engine_of(stage: int, section: dict, **checkpoint: object):
    return lives.engine_of("llama", stage, section | ({"checkpoint": checkpoint} if checkpoint else {}), torch.float32)


def step(engine, number: int) -> float:
    return lives.step_of(engine, number, torch.float32)


def same_contents(one: Path, other: Path) -> None:
    same_weights(one, other)
    states = [WrittenCheckpoint(each, CLASSES).model_state() for each in (one, other)]
    assert states[0]["global_steps"] == states[1]["global_steps"] and states[0]["seen"] == states[1]["seen"]


def same_weights(one: Path, other: Path) -> None:
    """Weights and states of the optimizer are the same bits in both checkpoints."""
    found, expected = WrittenCheckpoint(one, CLASSES), WrittenCheckpoint(other, CLASSES)
    assert found.plain_weights() == expected.plain_weights()
    for name in expected.plain_weights():
        assert found.value(name).equal(expected.value(name)), name
        mine, theirs = found.state(name), expected.state(name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(each)) for key, each in theirs.items())


def no_threads() -> bool:
    return not [each for each in threading.enumerate() if "saving" in each.name or "ds_npu_digests" in each.name]


def leaves_nothing(folder: Path) -> None:
    assert no_threads() and not list(folder.rglob("*.unfinished"))


def wait_for(condition) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < DEADLINE_S
        time.sleep(0.01)


def life(folder: str, cases: list[int]) -> None:
    """A save with a step in between holds what a save that blocks holds, and both go on alike."""
    for index in cases:
        where = Path(folder, f"{index}")
        behind, blocking = engine_of(*CASES[index], asynchronous=True), engine_of(*CASES[index])
        step(behind, 0), step(blocking, 0)
        seen = {"list": [1, 2]}
        behind.save_checkpoint(str(where / "behind"), client_state={"seen": seen})
        blocking.save_checkpoint(str(where / "blocking"), client_state={"seen": {"list": [1, 2]}})
        seen["list"].append(3)
        assert step(behind, 1) == step(blocking, 1)
        behind.finish_saving()
        dist.barrier()
        same_contents(where / "behind" / "global_step1", where / "blocking" / "global_step1")
        assert (where / "behind" / "latest").read_text() == "global_step1"
        leaves_nothing(where)
        as_planned(behind, CASES[index][0])
        other = engine_of(*CASES[index])
        other.load_checkpoint(str(where / "behind"))
        assert step(other, 1) == pytest.approx(step_again(blocking, where), rel=0)
        dist.barrier()


def as_planned(engine, stage: int) -> None:
    """The host memory of saves on rank 0 is what ``ds_npu check`` says of it, but for buffers and padding."""
    ranks = engine.topology.size("dp", "cp")
    count = sum(getattr(weight, "ds_numel", weight.numel()) for weight in engine.module.parameters())
    planned = count * saved_bytes_of_a_parameter(engine._config._param_dict, stage, ranks)
    if dist.get_rank() == 0:
        assert abs(engine.background_saves.snapshot.pinned_bytes / planned - 1) < 0.05


def step_again(engine, where: Path) -> float:
    engine.load_checkpoint(str(where / "blocking"))
    return step(engine, 1)


def slow_writers(folder: str) -> None:
    """Steps go on while a writer waits; ``latest`` moves when both have written; a second save and a load wait."""
    where, gate = Path(folder), threading.Event()
    engine = engine_of(1, {}, asynchronous=True)
    step(engine, 0)
    engine.save_checkpoint(folder, tag="first")
    engine.finish_saving()
    dist.barrier()
    write = DigestedWriter.write

    def waits(self, data):
        assert gate.wait(DEADLINE_S)
        return write(self, data)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(DigestedWriter, "write", waits)
        engine.save_checkpoint(folder, tag="second")
        expected = [step(engine, number) for number in (1, 2)]
        if dist.get_rank() == 0:
            wait_for(lambda: (where / "second" / "mp_rank_00_model_states.pt.unfinished").exists())
        dist.barrier()
        assert (where / "latest").read_text() == "first" and newest_whole(where) == where / "first"
        dist.barrier()
        threading.Timer(0.2, gate.set).start()
        engine.save_checkpoint(folder, tag="third")
        assert (where / "latest").read_text() in ("second", "third")
        engine.load_checkpoint(folder, tag="second")
        assert (where / "latest").read_text() == "third"
    assert [step(engine, number) for number in (1, 2)] == expected
    leaves_nothing(where)
    dist.barrier()
    fails(engine, where)


def fails(engine, where: Path) -> None:
    """A rank that cannot write: the next steps raise it on all ranks, and the engine saves on where it can."""

    def full(self, data):
        raise OSError(28, "No space left on device")

    message = r"behind training.*fourth was not saved to .*rank 1: .*is full.*to do"
    for ends in (lambda: step(engine, 3), lambda: engine.save_checkpoint(str(where), tag="fifth")):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(DigestedWriter, "write", full)
            engine.save_checkpoint(str(where), tag="fourth")
            wait_for(lambda: not engine.background_saves._thread.is_alive())
            dist.barrier()
            with pytest.raises(RuntimeError, match=message):
                ends()
        assert not (where / "fourth").exists() and (where / "latest").read_text() == "third"
        leaves_nothing(where)
        dist.barrier()
    engine.save_checkpoint(str(where), tag="fifth")
    engine.destroy()
    assert (where / "latest").read_text() == "fifth"
