"""`ds_npu sim` before anything is simulated: its command line, and how the libraries are built."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import simulated


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--devices", "0", "--", "true"), "found '0'; an integer >= 1"),
        (("--memory", "lots", "--", "true"), "found 'lots'; a size such as 64GiB"),
        (("--soc", "A100", "--", "true"), "910B2"),
        (("--fault", "malloc", "--", "true"), "found 'malloc'; NAME[:CALL][@RANK]=CODE"),
        ((), "no command to run"),
        (("--", "no-such-command"), "there is no command 'no-such-command'"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(arguments, said):
    done = simulated.sim(*arguments)
    assert done.returncode not in (0, 1)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_compiler_there_is_one_error_that_says_what_to_install(tmp_path):
    done = simulated.sim("--", sys.executable, "-c", "1", PATH=str(tmp_path), DS_NPU_CACHE=str(tmp_path), CXX="")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("ds_npu sim: no C++ compiler: looked for c++, g++, clang++.")
    assert "apt-get install g++" in line


# Takes its time, writes down what it compiles, and makes an object without any function of CANN's.
COMPILER = """#!/bin/bash
while [ $# -gt 1 ]; do
    case "$1" in -o) out="$2";; -c) source="$2";; esac
    shift
done
[ -n "$source" ] || { touch "$out"; exit; }
sleep 0.05
echo "$source" >>LOG
echo "int nothing;" | g++ -x c++ -c - -o "$out"
"""


def test_many_that_ask_at_once_build_once_and_a_killed_builder_leaves_no_lock(tmp_path):
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(COMPILER.replace("LOG", str(log)))
    compiler.chmod(0o755)
    environ = {**os.environ, "DS_NPU_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}
    command = [sys.executable, "-m", "ds_npu.cli.main", "sim", "--", "true"]
    killed = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL, start_new_session=True)
    while not log.exists():
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    asking = [subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=100)[1] for process in asking]
    assert [process.returncode for process in asking] == [0] * 4, said
    assert sum("building" in text for text in said) == 1
    compiled = log.read_text().splitlines()
    sources = len(list((simulated.ROOT / "ds_npu" / "simulator" / "csrc").rglob("*.cpp")))
    assert len(set(compiled)) == sources
    assert len(compiled) <= sources + 2 * (os.cpu_count() or 1)  # what the killed one had under way is done again


def test_a_compiler_that_fails_is_one_error_and_leaves_nothing_that_looks_built(tmp_path):
    for _ in range(2):
        done = simulated.sim("--", "true", CXX="/bin/false", DS_NPU_CACHE=str(tmp_path))
        assert done.returncode == 1
        assert "could not be built: /bin/false ended with 1" in done.stderr
        assert "Traceback" not in done.stderr
