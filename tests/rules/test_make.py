"""Makefile and .ci/run with programs that only pretend: what is done when, and what is said when one is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import parts as parts_module
import pytest
import raced_suite

ROOT = Path(__file__).resolve().parents[2]
# bash is named by its path in the Makefile.
PROGRAMS = ("cat", "find", "mkdir", "rm", "chmod", "touch", "tail", "tee", "grep", "mktemp", "dirname", "env", "bash")

# Makes a .venv whose python writes down what it is asked to install, and fails while there is a file "no-network".
PYTHON = """#!/bin/bash
case "$*" in
    "-m venv .venv")
        mkdir -p .venv/bin
        echo '#!/bin/bash
        [ ! -e no-network ] || exit 1
        echo "$*" >>installed' >.venv/bin/python
        chmod +x .venv/bin/python;;
esac
"""


class Checkout:
    """A folder with the Makefile, on a machine with few programs."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "programs"
        self.folder = folder / "checkout"
        self.programs.mkdir(parents=True)
        self.folder.mkdir()
        for name in PROGRAMS:
            (self.programs / name).symlink_to(shutil.which(name))
        self.add("g++", "#!/bin/bash\n")
        self.add("python3", PYTHON)
        for name in ("Makefile", "pyproject.toml", "setup.py"):
            shutil.copy(ROOT / name, self.folder)

    def add(self, program: str, text: str) -> None:
        (self.programs / program).write_text(text)
        (self.programs / program).chmod(0o755)

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.programs), "HOME": str(self.folder)}
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=60
        )

    def make_env(self) -> subprocess.CompletedProcess[str]:
        return self.run(shutil.which("make"), "env")

    def installed(self) -> list[str]:
        """What was installed since the last time this was asked."""
        log = self.folder / "installed"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


LACKS = {
    "compiler": ("g++", None, "no C++ compiler: install g++"),
    "python": ("python3", None, "there is no python3 on PATH"),
    "old python": (
        "python3",
        '#!/bin/bash\ncase "$*" in *version_info*) exit 1;; --version) echo Python 3.8.1;; esac\n',
        "Python 3.8.1 is older than 3.10",
    ),
    "venv": ("python3", '#!/bin/bash\ncase "$*" in *ensurepip*) exit 1;; esac\n', "no venv module"),
}


@pytest.mark.parametrize("lack", LACKS)
def test_what_is_missing_is_said(checkout, lack):
    program, text, said = LACKS[lack]
    (checkout.programs / program).unlink()
    if text:
        checkout.add(program, text)
    done = checkout.make_env()
    assert done.returncode != 0 and said in done.stderr, done.stderr
    assert not (checkout.folder / ".venv").exists()


def test_torch_comes_first_and_nothing_twice(checkout):
    done = checkout.make_env()
    assert done.returncode == 0, done.stderr
    first, second, third = checkout.installed()
    assert first.endswith("torch==2.13.0") and second.endswith("torch==2.13.0 deepspeed==0.19.8")
    assert "--editable .[examples,test]" in third
    assert checkout.make_env().returncode == 0
    assert checkout.installed() == []


def test_an_install_cut_short_is_begun_anew(checkout):
    (checkout.folder / "no-network").touch()
    assert checkout.make_env().returncode != 0
    (checkout.folder / ".venv" / "half").touch()
    (checkout.folder / "no-network").unlink()
    assert checkout.make_env().returncode == 0
    assert len(checkout.installed()) == 3 and not (checkout.folder / ".venv" / "half").exists()


@pytest.mark.parametrize("name", ["Makefile", "pyproject.toml", "setup.py"])
def test_a_changed_file_brings_the_environment_up_to_date(checkout, name):
    checkout.make_env()
    checkout.installed()
    (checkout.folder / ".venv" / "kept").touch()
    later = (checkout.folder / ".venv" / "complete").stat().st_mtime + 10
    os.utime(checkout.folder / name, (later, later))
    assert checkout.make_env().returncode == 0
    assert len(checkout.installed()) == 3 and (checkout.folder / ".venv" / "kept").exists()


def test_an_environment_of_another_folder_is_not_used(checkout):
    checkout.make_env()
    checkout.installed()
    (checkout.folder / ".venv" / "theirs").touch()
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("moved"))
    assert checkout.make_env().returncode == 0
    assert len(checkout.installed()) == 3 and not (checkout.folder / ".venv" / "theirs").exists()


def test_the_lock_of_a_killed_build_is_removed(checkout):
    lock = checkout.folder / ".torch_extensions" / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    (lock.parent / "cpu_adam.so").touch()
    assert checkout.run(shutil.which("make"), "unlock").returncode == 0
    assert [path.name for path in lock.parent.iterdir()] == ["cpu_adam.so"]


@pytest.mark.parametrize("named", ["", "DEEPSPEED_CHECKOUT=a", "DEEPSPEED_CHECKOUT=a DEEPSPEED_EXAMPLES=b"])
def test_deepspeeds_own_tests_are_run_or_said_not_to_be(checkout, named):
    checkout.make_env()
    checkout.installed()
    done = checkout.run(shutil.which("make"), "upstream", *named.split())
    assert done.returncode == 0, done.stderr
    asked = checkout.installed()
    for variable, script, what in (
        ("DEEPSPEED_CHECKOUT", "deepspeed_unit_tests.py a", "DeepSpeed's unit tests"),
        ("DEEPSPEED_EXAMPLES", "deepspeed_examples.py b", "DeepSpeed's examples"),
    ):
        is_said = f"NOT RUN: {what}" in done.stderr
        assert (f"tests/support/{script}" in asked, is_said) == (variable in named, variable not in named)


CLOSING = "total: {} failed, 3 skipped"


@pytest.mark.parametrize(("status", "counts"), [(0, "5 passed, 0"), (2, "4 passed, 1")])
def test_ci_ends_with_the_sum(checkout, status, counts):
    closing = CLOSING.format(counts)
    make = f'#!/bin/bash\necho "asked: $*"\necho "{closing}"\n'
    checkout.add("make", make + (f"echo 'make: *** Error 1' >&2\nexit {status}\n" if status else ""))
    done = checkout.run(ROOT / ".ci" / "run")
    assert done.returncode == status
    assert done.stdout.splitlines()[-1] == closing
    assert done.stdout.startswith("asked: ") and done.stdout.splitlines()[0].split()[-1] == "test"


PART = """#!/bin/bash
echo "asked: $*" >>{log}
for each in "$@"; do case "$each" in --junit-xml=*) printf '%s' '{xml}' >"${{each#*=}}";; esac; done
exit {status}
"""
SUITE = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'


@pytest.mark.parametrize(
    ("first", "second", "status", "total"),
    [
        ((SUITE.format(4, 0, 0, 1), 0), (SUITE.format(6, 0, 0, 0), 0), 0, "9 passed, 0 failed, 1 skipped"),
        ((SUITE.format(4, 1, 0, 0), 1), (SUITE.format(6, 0, 0, 0), 0), 1, "9 passed, 1 failed, 0 skipped"),
        ((SUITE.format(4, 0, 0, 0), 0), (SUITE.format(6, 1, 1, 2), 1), 1, "6 passed, 2 failed, 2 skipped"),
        # Killed before it could write; killed behind it.
        (("", 137), (SUITE.format(6, 0, 0, 0), 0), 1, "6 passed, 1 failed, 0 skipped"),
        ((SUITE.format(4, 0, 0, 0), 139), (SUITE.format(6, 0, 0, 0), 0), 1, "10 passed, 1 failed, 0 skipped"),
    ],
)
def test_both_parts_run_and_are_summed(tmp_path, first, second, status, total):
    log, programs = tmp_path / "log", [tmp_path / "first", tmp_path / "second"]
    for program, (xml, code) in zip(programs, (first, second), strict=True):
        program.write_text(PART.format(log=log, xml=xml, status=code))
        program.chmod(0o755)
    parts = ROOT / "tests" / "support" / "parts.py"
    command = [sys.executable, parts, programs[0], "tests/npu", parts_module.THEN, programs[1], "-x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == status
    assert done.stdout.splitlines()[-1] == f"total: {total}"
    asked = [line.rpartition(" --junit-xml=")[0] for line in log.read_text().splitlines()]
    assert asked == ["asked: tests/npu", "asked: -x"]


def test_make_runs_both_parts_of_the_suite(checkout):
    checkout.make_env()
    checkout.installed()
    done = checkout.run(shutil.which("make"), "-n", "whole")
    (line,) = [each for each in done.stdout.replace("\\\n", "").splitlines() if "parts.py" in each]
    first, second = line.split(parts_module.THEN)
    assert "BUDGET=" in first and "BUDGET=" in second
    assert first.split()[-3:] == ["-m", "pytest", "tests/npu"] and second.split()[-3:] == ["python", "-m", "pytest"]


@pytest.mark.parametrize(
    ("code", "lines", "passes"),
    [
        (0, ["3 passed in 1 s", "ds_npu sim: no race among 9 tasks and waits"], True),
        (1, ["4 skipped in 1 s", f"ds_npu sim: --races: {raced_suite.UNUSED}"], True),
        (1, ["1 failed in 1 s", f"ds_npu sim: --races: {raced_suite.UNUSED}"], False),
        (1, ["2 skipped, 1 error in 1 s", f"ds_npu sim: --races: {raced_suite.UNUSED}"], False),
        (1, ["3 passed in 1 s", "What to do: let the stream of the second wait for the first"], False),
        (-9, [], False),
        (5, ["13 deselected in 12.78s", f"ds_npu sim: --races: {raced_suite.UNUSED}"], True),
        (5, ["no tests ran in 0.10s", f"ds_npu sim: --races: {raced_suite.UNUSED}"], False),
        (2, ["13 deselected, 1 error in 1 s"], False),
    ],
)
def test_a_file_with_a_race_or_a_failure_does_not_pass(code, lines, passes):
    assert (raced_suite.complaint(code, lines) == "") == passes
