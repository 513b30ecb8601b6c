"""An error that is another rank's end is followed by a sentence that says so, and any other error by none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dying_ranks import ended

from ds_npu.config.problems import ConfigError, Problem
from ds_npu.engine.failures.failed_ranks import Ending, ending_of

ROOT = Path(__file__).resolve().parents[2]
GLOO = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:"
ENDED = {
    f"{GLOO}553] Connection closed by peer [127.0.0.1]:55983. This is typically caused by a remote worker crashing": (
        "Connection closed by peer [127.0.0.1]:55983"
    ),
    f"{GLOO}537] Read error [::1]:11435: Connection reset by peer. This is typically": "Connection reset by peer",
    f"{GLOO}300] writev: Broken pipe": "Broken pipe",
    "failed to recv, got 0 bytes. Failed to recv, got 0 bytes. Connection was likely closed": "Failed to recv",
    "simulated NPU 0 stopped: communicator group_name_0, rank 0: rank 1 (pid 7) has exited; this rank waits": (
        "rank 1 (pid 7) has exited"
    ),
}
WAITED = {
    "[unbound_buffer.cc:89] Timed out waiting 60000ms for recv operation to complete": "Timed out waiting 60000ms",
    "EI0002: The wait execution of the Notify register times out": "EI0002",
}


@pytest.fixture
def said_of(monkeypatch):
    """What rank 3 of 8 says of an error after its traceback, where there is no process group any more."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")

    def said(error: BaseException) -> str:
        ending = ending_of(error, None, None)
        assert ending.is_whole
        return ending.line

    return said


@pytest.mark.parametrize("text", ENDED)
def test_a_rank_that_ended_is_named_as_the_cause(text, said_of):
    said = said_of(RuntimeError(text))
    assert said.startswith("rank 3 of 8 stopped because another rank ended first")
    assert ENDED[text] in said and "What to do: find the first error in the logs of the other ranks" in said


@pytest.mark.parametrize("text", WAITED)
def test_a_rank_that_is_late_is_another_matter(text, said_of):
    said = said_of(RuntimeError(text))
    assert WAITED[text] in said and "which one hangs" in said


def test_a_cause_counts(said_of):
    error = ValueError("in the script")
    error.__cause__ = RuntimeError("Connection closed by peer [10.0.0.1]:1")
    assert "another rank ended first" in said_of(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("size mismatch"), ConnectionResetError("Connection reset by peer"), KeyboardInterrupt()]
)
def test_other_errors_are_left_alone(error, said_of):
    assert said_of(error) == ""


def test_a_refused_config_is_said_once_on_a_node(monkeypatch):
    error = ConfigError([Problem("ds_npu.parallel.tensor", 7, "a divisor of 8")])
    for local_rank, is_whole in ((0, True), (1, False)):
        for name, value in (("RANK", 2 + local_rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", 4)):
            monkeypatch.setenv(name, f"{value}")
        ending = ending_of(error, None, None)
        assert ending.is_whole == is_whole
    assert ending.line.startswith("rank 3 of 4 ended with the error that the first rank of this node says: 1 mistake")
    assert "ds_npu.parallel.tensor: found 7; a divisor of 8" in ending.line


def test_one_rank_prints_what_python_prints(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ending_of(RuntimeError("Connection closed by peer"), None, None) == Ending(is_whole=True)


def test_the_error_itself_is_shown_first(tmp_path):
    code = (
        "import sys; from ds_npu.engine.failures.failed_ranks import explain_failed_ranks\n"
        "explain_failed_ranks(); explain_failed_ranks()\n"
        "raise RuntimeError('Connection closed by peer [127.0.0.1]:5' if sys.argv[1] == 'lost' else 'mine')"
    )
    environ = os.environ | {"RANK": "0", "WORLD_SIZE": "2"}
    for word, extra in (("lost", 1), ("mine", 0)):
        run = [sys.executable, "-c", code, word]
        done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=ROOT, timeout=100, env=environ)
        lines = done.stderr.splitlines()
        assert done.returncode == 1 and lines[0].startswith("Traceback")
        assert lines[-1 - extra].startswith("RuntimeError: ")
        assert sum("[ds_npu] ERROR: rank" in line for line in lines) == extra


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward", "step", "save"])
def test_the_survivor_of_a_killed_rank(where):
    places = ["forward", "backward", "step", "save"]
    said = ended(where, 29760 + places.index(where), {"DS_ACCELERATOR": "cpu"}).splitlines()
    assert said[-1].startswith("[ds_npu] ERROR: rank 0 of 2 stopped because another rank ended first")
    assert any("RuntimeError: " in line for line in said[:-1])
