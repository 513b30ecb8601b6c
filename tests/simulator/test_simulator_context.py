"""Context-parallel attention on NPUs whose streams are delayed or recorded: what waits for what, and what need not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import simulated
from stream_trace import Message, Task, Trace

from ds_npu.parallel.context.ring_schedule import ring_steps

pytestmark = pytest.mark.slow  # the libraries are compiled first, if they are not yet

RANKS = 4
FORWARD, BACKWARD = "aclnnFlashAttentionScore", "aclnnFlashAttentionScoreGrad"
KEYS_AND_VALUES, GRADIENTS = "bf16", "fp32"
"""How a trace shows which kind of message it is."""


def run(script: str, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    """The lines that a script of tests/npu prints."""
    command = ("--devices", str(RANKS), *options, "--", sys.executable, f"tests/npu/{script}.py", *arguments)
    path = os.pathsep.join([str(simulated.ROOT), str(simulated.ROOT / "tests" / "support")])
    return simulated.printed(simulated.sim(*command, timeout=300, DS_ACCELERATOR="npu", PYTHONPATH=path))


@pytest.mark.parametrize("seed", ["1", "2"])
def test_nothing_is_read_before_it_is_there(seed):
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/npu/test_context_attention_npu.py",
    )
    done = simulated.sim("--chaos", seed, "--", *command, timeout=300)
    assert done.returncode == 0, done.stdout
    assert f"chaos {seed}" in done.stderr


def test_faults_in_the_messages_are_found():
    found = dict(line.split(": ", 1) for line in run("context_faults", options=("--chaos", "1")))
    assert found.pop("none") == "right"
    assert len(found) == 8 and set(found.values()) == {"wrong numbers"}, found


def hidden(trace: Trace, rank: int, window: int) -> Iterator[tuple[Message, Task, list[Task]]]:
    """What a rank sends in its last forward and backward, with the computation, on each rank, that should hide it: of
    the step at which the hop is made, for gradients of the next one."""
    steps = ring_steps(rank, RANKS, window)

    def during(name: str, number: int) -> list[Task]:
        kernels = [[task for task in trace.of_device(each) if task.name == name] for each in range(RANKS)]
        return [of_rank[number - len(steps)] for of_rank in kernels]

    keys = [number for number, step in enumerate(steps) for _ in step.hops]
    gradients = [number + 1 for number, step in enumerate(steps) if step.gradient]
    wanted = {
        KEYS_AND_VALUES: [during(name, number) for name in (FORWARD, BACKWARD) for number in keys],
        # What the last step sends home nothing can hide.
        GRADIENTS: [during(BACKWARD, number) if number < len(steps) else [] for number in gradients],
    }
    tasks = trace.of_device(rank)
    for kind, computations in wanted.items():
        sent = [(each, task) for task in tasks for each in task.messages if each.sends and each.type == kind]
        assert len(sent) % len(computations) == 0 < len(sent)
        for (message, task), hiding in zip(sent[-len(computations) :], computations, strict=True):
            if hiding:
                yield message, task, hiding


class Found(NamedTuple):
    """What the recorded order says of the messages of all ranks that a computation should hide."""

    exposed: list[str]
    """Those that are handed to their stream after it, or must wait for it, whatever the streams' order."""
    late: float
    """The share that began after it had ended. A rank that is ahead waits for the other, so the later rank counts."""


def found_in(folder: Path, window: int) -> Found:
    trace, exposed, late = Trace(folder), [], []
    for rank in range(RANKS):
        for message, sending, computations in hidden(trace, rank, window):
            said = f"{message.type} from rank {rank}, its task {sending.place},"
            ends = trace.ends[message.way]
            for computation in computations:
                after = trace.after(computation)
                if any({(end, False), (end, True)} & after for end in ends):
                    exposed.append(f"{said} must wait for rank {computation.device}")
            hiding = {each.device: each for each in computations}
            if any(end.place > hiding[end.device].place for end in ends):
                exposed.append(f"{said} is handed over late")
            late.append(max(end.begun for end in ends) >= max(hiding[end.device].ended for end in ends))
    return Found(exposed, sum(late) / len(late))


@pytest.mark.parametrize("chaos", [None, "1", "2"])
@pytest.mark.parametrize("window", [RANKS, 2], ids=["ring", "double ring"])
def test_every_message_may_be_on_its_way_while_a_block_is_computed(window, chaos, tmp_path):
    """With chaos the seed decides when a message begins, among all that events allow: that is then not looked at.
    Without, a busy machine may keep a stream's thread waiting for as long as a block takes, now and then."""
    options = ("--trace", str(tmp_path), *(("--chaos", chaos) if chaos else ()))
    run("context_overlap", str(window), options=options)
    found = found_in(tmp_path, window)
    assert found.exposed == []
    assert chaos or found.late <= 0.25


def test_a_message_that_nothing_hides_is_found(tmp_path):
    run("context_overlap", str(RANKS), "late", options=("--trace", str(tmp_path)))
    found = found_in(tmp_path, RANKS)
    assert found.late > 0.5
    for what in ("must wait for rank", "is handed over late"):
        assert len({line[:40] for line in found.exposed if what in line and line.startswith(KEYS_AND_VALUES)}) > 1
