"""An exception that a script catches in a staged forward: every rank ends the batch, and the next one is as ever."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from caught_failures import Run, failing, fails_on, hold, wrong_labels
from ranks import run_on_ranks

from ds_npu.engine.failures.batch_failures import FailedStageError
from ds_npu.parallel.pipeline.executor import PipelineError


def section(schedule: str, **parallel: int) -> dict:
    virtual = {"virtual_stages": 2} if schedule == "interleaved" else {}
    return {"parallel": {"pipeline": 2, **parallel}, "pipeline": {"schedule": schedule, **virtual}}


def every_failure(schedules: tuple[str, ...]) -> None:
    for index, schedule in enumerate(schedules):
        hold(section(schedule), index % 3)


def of_one_data_rank(run: Run) -> None:
    """The other data ranks have no bad batch."""
    is_bad = run.engine.topology.rank("dp") == 1
    batch = wrong_labels(run.batches[0]) if is_bad else run.batches[0]
    last = run.engine.pipeline.layout.last_rank
    said = rf"since rank {run.engine.topology.degrees.groups('pp')[1][last]} failed in .* by IndexError"
    failing(run, batch, said)


def of_all_tensor_ranks(run: Run) -> None:
    failing(run, run.batches[0] | {"position_ids": torch.full_like(run.batches[0]["labels"], 10**6)}, "by IndexError")


def other_axes() -> None:
    hold(section("1f1b"), 1, bad=of_one_data_rank)
    hold(section("zb_v", tensor=2), 0, bad=of_all_tensor_ranks)


def traceback_of_another() -> None:
    run = Run(section("1f1b"), 1, torch.float64)
    with fails_on(1, run.engine, 0, ValueError("given up")), pytest.raises(PipelineError) as raised:
        run.forward(run.batches[0])
    kind = ValueError if dist.get_rank() == 1 else FailedStageError
    assert isinstance(raised.value.__cause__, kind)
    assert "given up" in f"{raised.value.__cause__}"


def of_one_tensor_rank() -> None:
    """The others wait for it in a forward: it says so, runs no further batch, and they end when it does."""
    run = Run(section("1f1b", tensor=2), 1, torch.float64)
    with fails_on(0, run.engine, 0, ValueError("given up")):
        if dist.get_rank() == 0:
            for said in ("by ValueError: given up .* cannot be ended on all ranks: the tensor", "out of step"):
                with pytest.raises(PipelineError, match=said):
                    run.forward(run.batches[0])
        else:
            with pytest.raises(RuntimeError):
                run.forward(run.batches[0])
    os._exit(0)


def test_every_failure():
    run_on_ranks(2, every_failure, ("1f1b", "zb_v"))


@pytest.mark.slow
def test_every_failure_by_other_schedules():
    run_on_ranks(2, every_failure, ("interleaved", "zb_h1", "dualpipe_v"))


def test_failures_beside_other_axes():
    run_on_ranks(4, other_axes)


def test_another_rank_says_where():
    run_on_ranks(2, traceback_of_another)


@pytest.mark.slow
def test_one_of_the_tensor_ranks():
    run_on_ranks(4, of_one_tensor_rank)
