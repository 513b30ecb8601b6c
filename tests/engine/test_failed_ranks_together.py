"""What several ranks print of one end: one of them the error, whole, the others a line that points to it."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist
from endings import LAUNCHERS, of_launcher, of_ranks
from ranks import run_on_ranks

from ds_npu.engine.failures.failed_ranks import ending_of, tell_torchelastic
from ds_npu.engine.failures.failure_record import Failure, FailureRecord

GONE = "Connection closed by peer [127.0.0.1]:55983"


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def agree_on_endings() -> None:
    """Each case in a record of its own; ranks that are not named ended before by what the first of them did."""
    rank = dist.get_rank()

    def ended(case: str, error: BaseException) -> tuple[bool, str]:
        record = FailureRecord.of_this_world()
        record.store = dist.PrefixStore(case, record.store)
        ending = ending_of(error, error.__traceback__, record)
        dist.barrier()
        return ending.is_whole, ending.line

    is_whole, line = ended("alike", _raised(ValueError("no batch\nat all")))
    assert is_whole == (rank == 0) and ("rank 0, which says it: ValueError: no batch ..." in line) == (rank > 0)

    is_whole, line = ended("interrupted", _raised(KeyboardInterrupt()))
    assert is_whole == (rank == 0)

    def alone(case: str, guilty: int) -> None:
        record = FailureRecord.of_this_world()
        record.store = dist.PrefixStore(case, record.store)
        if rank == guilty:
            error = _raised(KeyError("column"))
            assert ending_of(error, error.__traceback__, record).is_whole
        dist.barrier()
        if rank != guilty:
            error = _raised(RuntimeError(GONE))
            ending = ending_of(error, error.__traceback__, record)
            assert not ending.is_whole
            assert (
                f"because of rank {guilty}, which failed first" in ending.line and "KeyError: 'column'" in ending.line
            )
        dist.barrier()

    alone("alone", 1)
    alone("alone_0", 0)

    is_whole, line = ended("nobody says why", _raised(RuntimeError(GONE)))
    assert "another rank ended first" in line
    whole: list[bool] = [False] * 3
    dist.all_gather_object(whole, is_whole)
    assert sorted(whole) == [False, False, True]
    dist.all_gather_object(whole, ended("different", _raised((ValueError if rank else KeyError)("x")))[0])
    assert whole[0] and sorted(whole[1:]) == [False, True], "ranks 1 and 2 share an error"


@pytest.mark.slow
def test_three_ranks_agree():
    run_on_ranks(3, agree_on_endings)


def test_what_torchrun_shows_last(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"{file}")
    mine = Failure(1, "node", "KeyError at a.py:3", "KeyError: 'x'", "a.py:3 in read")
    tell_torchelastic(mine, "", is_cause=True)
    first = json.loads(file.read_text())["message"]
    assert "KeyError: 'x' (at a.py:3 in read" in first["extraInfo"]["py_callstack"]
    tell_torchelastic(mine, "another line", is_cause=True)
    assert json.loads(file.read_text())["message"] == first, "what @record has written stays"
    tell_torchelastic(mine, "rank 0 ended because of rank 1", is_cause=False)
    second = json.loads(file.read_text())["message"]["extraInfo"]
    assert second["py_callstack"] == "rank 0 ended because of rank 1"
    assert int(second["timestamp"]) > int(first["extraInfo"]["timestamp"])


def tracebacks(lines: list[str]) -> int:
    return sum("Traceback (most recent call last)" in line for line in lines)


HOWS = ["alone1", "alike", "alone0", "killed0", "killed1", "interrupted", "late"]


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize("how", HOWS)
def test_the_screens_of_two_ranks(how):
    screens = of_ranks(how)
    last = [[line for line in screen if line][-1:] or [""] for screen in screens]
    whole = [tracebacks(screen) for screen in screens]
    if how in ("alone0", "alone1"):
        guilty = int(how[-1])
        assert whole[guilty] == 1 and whole[1 - guilty] == 0, screens
        assert "]: KeyError: " in last[guilty][0], screens
        assert f"rank {1 - guilty} of 2 ended because" in last[1 - guilty][0], screens
    elif how in ("killed0", "killed1"):
        assert "another rank ended first" in last[0][0] or "because rank 0 ended first" in last[1][0], screens
    else:
        assert whole[0] >= 1 and whole[1] == 0, screens
        assert "[ds_npu] ERROR: rank 1 of 2 ended with the same error as" in last[1][0], screens


CASES = [(launcher, how) for how in ("alone1", "alike", "alone0", "refused", "killed1") for launcher in LAUNCHERS]


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(("launcher", "how"), CASES)
def test_the_end_of_a_launcher_s_screen(launcher, how):
    screen = of_launcher(launcher, how)
    text = "\n".join(screen)
    if how == "killed1":
        assert "third_party/gloo" not in text or "[ds_npu] ERROR: rank 0 of 2" in text.rpartition("third_party/gloo")[2]
        return
    error = {"alone1": "no such column on rank 1", "alone0": "no such column on rank 0", "alike": "batch 1 is empty"}
    said = error.get(how, "1 mistake in the DeepSpeed config")
    assert text.count("in read_batch\n") <= 1 and said in text, text
    if launcher != "deepspeed":  # whose launcher ends with lines of its own
        assert said in "\n".join(screen[-12:]), text
