"""Two computations that take turns: their order, what each thread knows, and what is left where one fails."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import pytest
import torch

from ds_npu.parallel.runtime.micro_batch import new_forward
from ds_npu.parallel.runtime.paired_passes import (
    PAIRED_PASS,
    AbandonedError,
    PairedPass,
    PairRunner,
    PassKind,
    running_pass,
)

CPU = torch.device("cpu")
FIRST, SECOND = PassKind.FORWARD, PassKind.BACKWARD
KNOWN: ContextVar[str] = ContextVar("KNOWN")


def steps(log: list[str], turns: PairedPass, part: PassKind, count: int):
    def run() -> None:
        for index in range(count):
            log.append(f"{part.value[0]}{index}")
            turns.hand_over(part)
        log.append(f"{part.value[0]} ends")

    return run


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        (2, 2, "f0 b0 f1 b1 f ends b ends"),
        (0, 2, "f ends b0 b1 b ends"),
        (3, 1, "f0 b0 f1 b ends f2 f ends"),
        (1, 3, "f0 b0 f ends b1 b2 b ends"),
    ],
)
def test_the_order_depends_on_the_places_alone(forward, backward, expected):
    with PairRunner(CPU) as runner:
        for _ in range(3):
            log: list[str] = []
            pair = PairedPass(), PairedPass()
            runner.run(steps(log, pair[0], FIRST, forward), steps(log, pair[1], SECOND, backward), pair)
            assert " ".join(log) == expected
            # Behind it nobody waits for anybody.
            pair[0].hand_over(FIRST)
            pair[1].hand_over(SECOND)


def test_a_backward_that_computes_again_keeps_its_turn():
    log, pair = [], (PairedPass(), PairedPass())

    def backward() -> None:
        pair[1].hand_over(FIRST)
        pair[1].finish_backward()
        log.append("again")

    with PairRunner(CPU) as runner:
        runner.run(lambda: log.append("forward"), backward, pair)
    assert log == ["forward", "again"]


def test_a_forward_that_runs_autograd_lets_the_backward_end():
    log, pair = [], (PairedPass(), PairedPass())

    def forward() -> None:
        with new_forward() as micro_batch:
            PAIRED_PASS.set(micro_batch, pair[0])
            pair[0].hand_over(FIRST)
            for _ in range(2):
                running_pass().finish_backward()
                log.append("autograd")
            pair[0].hand_over(FIRST)

    with PairRunner(CPU) as runner:
        runner.run(forward, steps(log, pair[1], SECOND, 3), pair)
    assert log == ["b0", "b1", "b2", "b ends", "autograd", "autograd"]


def test_the_other_thread_knows_what_this_one_does():
    found = {}

    def backward() -> None:
        found["autocast"] = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        found["known"], found["name"] = KNOWN.get(), threading.current_thread().name

    KNOWN.set("here")
    with PairRunner(CPU) as runner, torch.autocast("cpu", torch.float16):
        runner.run(lambda: None, backward, (PairedPass(), PairedPass()))
    assert found == {"autocast": (True, torch.float16), "known": "here", "name": "ds_npu backward_0"}
    assert not [each for each in threading.enumerate() if each.name.startswith("ds_npu")]


def failing(turns: PairedPass, part: PassKind, at: int):
    def run() -> None:
        for index in range(3):
            if index == at:
                raise ValueError(f"{part.value} {at}")
            turns.hand_over(part)

    return run


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("part", [FIRST, SECOND])
def test_where_one_fails_the_other_ends_and_the_error_is_its(part, at):
    pair, log = (PairedPass(), PairedPass()), []
    calls = [steps(log, turns, each, 5) for turns, each in zip(pair, (FIRST, SECOND), strict=True)]
    index = 0 if part is FIRST else 1
    calls[index] = failing(pair[index], part, at)
    with PairRunner(CPU) as runner, pytest.raises(ValueError, match=f"{part.value} {at}"):
        runner.run(*calls, pair)
    assert not any("ends" in each for each in log)


def test_an_interrupt_ends_both():
    pair, seen = (PairedPass(), PairedPass()), []

    def backward() -> None:
        try:
            pair[1].hand_over(SECOND)
        except AbandonedError as error:
            seen.append(error)
            raise

    def forward() -> None:
        pair[0].hand_over(FIRST)
        raise KeyboardInterrupt

    with PairRunner(CPU) as runner, pytest.raises(KeyboardInterrupt):
        runner.run(forward, backward, pair)
    assert len(seen) == 1


def test_gradients_find_their_turns_by_the_graph():
    """A node of the graph hands over, whose forward has known the turns of its micro-batch."""
    log: list[str] = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            ctx.paired_pass = running_pass()
            return x * 2

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
            log.append("node")
            ctx.paired_pass.hand_over(SECOND)
            return gradient * 2

    pair = PairedPass(), PairedPass()
    x = torch.ones(2, requires_grad=True)
    with new_forward() as micro_batch:
        PAIRED_PASS.set(micro_batch, pair[1])
        out = Node.apply(Node.apply(x)).sum()
    with PairRunner(CPU) as runner:
        runner.run(steps(log, pair[0], FIRST, 3), out.backward, pair)
    assert log == ["f0", "node", "f1", "node", "f2", "f ends"]
    assert x.grad.tolist() == [4.0, 4.0]
