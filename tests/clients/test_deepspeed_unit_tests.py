"""What compares DeepSpeed's own unit tests with and without ds_npu; the tests themselves need a checkout of DeepSpeed.

``make exhaustive DEEPSPEED_CHECKOUT=...`` runs the list beside this file.
"""

from __future__ import annotations

import json
import subprocess
import sys

import deepspeed_unit_tests as runner
import pytest

TOY = """
import os, sys
import pytest

def test_always():
    pass

def test_without_ds_npu():
    assert "ds_npu" not in sys.modules

def test_never():
    assert False

@pytest.mark.parametrize("number", [1, 2])
def test_for_more_ranks(number):
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    if int(os.environ["LOCAL_SIZE"]) < 4:
        pytest.skip("not enough")
"""


@pytest.fixture
def checkout(tmp_path):
    """A git repository with a folder of tests, as DeepSpeed's."""
    unit = tmp_path / "checkout" / "tests" / "unit"
    unit.mkdir(parents=True)
    (unit / "common.py").touch()
    (unit / "test_toy.py").write_text(TOY)
    (unit / "test_broken.py").write_text("import nothing_that_is_there\n")
    return unit.parents[1]


def run(*arguments):
    command = [sys.executable, runner.__file__, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_an_outcome_that_ds_npu_changes_is_named(checkout):
    done = run(checkout, "unit/test_toy.py", "unit/test_broken.py")
    assert done.returncode == 1, done.stderr
    first, named, second, last = done.stdout.splitlines()
    assert first.startswith("unit/test_toy.py: 2 passed, 1 failed, 2 skipped; 1 differ")
    assert named == "  unit.test_toy.test_without_ds_npu: passed without ds_npu, failed with it"
    assert second.startswith("unit/test_broken.py: 0 passed, 1 failed, 0 skipped; 0 differ")
    assert last.startswith("1 outcomes differ")


def test_a_git_directory_is_read_as_a_work_tree_is(checkout, tmp_path):
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a"]):
        subprocess.run(["git", "-C", checkout, *command], check=True)
    for source, name in ((checkout, "tree"), (checkout / ".git", "directory")):
        to = tmp_path / name
        to.mkdir()
        assert (runner.copy_tests(source, to) / "unit" / "test_toy.py").read_text() == TOY


def test_outcomes_are_compared_one_by_one():
    plain = {"a": "passed", "b": "failed", "c": "skipped", "d": "passed"}
    ours = {"a": "passed", "b": "failed", "c": "passed", "e": "passed"}
    assert runner.differing(plain, ours) == {
        "c": "skipped without ds_npu, passed with it",
        "d": "passed without ds_npu, absent with it",
        "e": "absent without ds_npu, passed with it",
    }
    assert runner.differing(plain, plain) == {}


def test_the_list_says_what_was_run():
    recorded = json.loads(runner.RESULTS.read_text())
    assert recorded["checkout"] and recorded["deepspeed"] and recorded["ranks"] == runner.RANKS
    for file, row in recorded["files"].items():
        explained = {**row.get(runner.DIFFER, {}), **row.get(runner.SECTION, {})}
        assert file.startswith("unit/") and set(runner.KINDS) <= row.keys()
        assert row.keys() <= {*runner.KINDS, runner.DIFFER, runner.SECTION}
        assert all(isinstance(why, str) and why for why in explained.values())
