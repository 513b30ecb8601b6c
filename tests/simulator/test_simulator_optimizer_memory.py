"""A step over swapped state on an NPU whose streams are recorded: what may run at once."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest
import simulated
from stream_trace import Task, Trace

pytestmark = pytest.mark.slow  # the libraries are compiled first, if they are not yet

CHUNKS, ARRAYS = 8, 3
"""Of the script, and what is copied of a chunk: the master and two moments."""


def traced(folder: Path) -> Trace:
    path = os.pathsep.join([str(simulated.ROOT), str(simulated.ROOT / "tests" / "support")])
    options = ("--devices", "1", "--trace", str(folder), "--", sys.executable, "tests/npu/swapped_step.py")
    done = simulated.sim(*options, timeout=300, DS_ACCELERATOR="npu", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    return Trace(folder)


def test_a_chunk_arrives_while_one_is_stepped_and_one_leaves(tmp_path):
    trace = traced(tmp_path)
    copies: dict[int, list[Task]] = {}
    for task in trace.tasks:
        if task.name == "aclrtMemcpyAsync" and task.stream:
            copies.setdefault(task.stream, []).append(task)
    # Of the second step; the first brings the master alone, and allocates the moments.
    arriving, leaving = (tasks[-CHUNKS * ARRAYS :: ARRAYS] for _, tasks in sorted(copies.items()))
    steps = [task for task in trace.tasks if task.name == "aclnnInplaceAddcdiv"][-CHUNKS:]
    for index in range(1, CHUNKS - 1):
        at_once = (arriving[index + 1], steps[index], leaving[index - 1])
        for one, other in itertools.permutations(at_once, 2):
            assert not {(other, False), (other, True)} & trace.after(one), (index, one, other)
        # What a slot is filled with comes after what it held has left, and a step after its chunk has arrived.
        assert (steps[index], False) in trace.after(arriving[index]) or (steps[index], True) in trace.after(
            arriving[index]
        )
        if index >= 2:
            assert (arriving[index + 1], True) in trace.after(leaving[index - 2]), index
