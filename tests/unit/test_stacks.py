"""Reading where threads stand keeps nothing of theirs: what a function had is freed when it returns."""

from __future__ import annotations

import linecache
import threading
import weakref
from collections.abc import Callable

import pytest

from ds_npu.engine.failures import joint_calls
from ds_npu.features.watch.stalls import LEAST_SECONDS, StallWatch
from ds_npu.stacks import main_stack, stacks


class Held:
    """Stands for a tensor."""


def has_stood_still() -> str | None:
    watch = StallWatch(10, "rank 0 of 1")
    for step in range(7):
        watch.look(float(step), (step, step), is_training=True)
    return watch.look(6.0 + LEAST_SECONDS, (6, 6), is_training=True)


def in_a_call(held: Held, is_inside: threading.Event, may_leave: threading.Event) -> None:
    assert held
    is_inside.set()
    assert may_leave.wait(10)


@pytest.mark.parametrize("read", [has_stood_still, joint_calls._line_of_script])
def test_while_source_is_read_functions_that_return_free_what_they_had(read, monkeypatch):
    """The main thread leaves a function while another thread reads the source of its lines, from a slow disk, say."""
    is_inside, may_leave, has_left = threading.Event(), threading.Event(), threading.Event()
    checkcache, said = linecache.checkcache, list[str]()

    def slow(name: str | None = None) -> None:
        may_leave.set()
        assert has_left.wait(10)
        checkcache(name)

    def speak() -> None:
        assert is_inside.wait(10)
        monkeypatch.setattr(linecache, "checkcache", slow)
        monkeypatch.setattr(linecache, "getline", read_line)
        said.append(read())

    getline: Callable[..., str] = linecache.getline

    def read_line(*args: object) -> str:
        slow()
        return getline(*args)

    speaker = threading.Thread(target=speak)
    speaker.start()
    held = [Held()]
    alive = weakref.ref(held[0])
    in_a_call(held.pop(), is_inside, may_leave)
    is_alive = alive() is not None
    has_left.set()
    speaker.join(20)
    assert not is_alive
    assert not speaker.is_alive() and "in_a_call" in said[0]


def test_the_caller_is_the_innermost_call():
    assert main_stack()[-1].name == "main_stack" and main_stack()[-2].name == "test_the_caller_is_the_innermost_call"
    innermost = stacks()[threading.get_ident()][-1]
    assert innermost.name == "test_the_caller_is_the_innermost_call" and "stacks()" in innermost.line
