"""Races in records made by hand, and overlaps of strided tensors against sets of bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_npu.simulator import races as module
from ds_npu.simulator.races import Bytes, overlap, race_report, races
from ds_npu.simulator.replay.recording import RecordedAction, RecordedRun

READ, WRITTEN, CHANGED = 0, 1, 2
SIZE = 1024


class Host:
    """Writes down what the host of one process does."""

    def __init__(self) -> None:
        self.actions: list[RecordedAction] = []
        self.events = itertools.count(1)

    def add(self, name: str, stream: int, detail: str = "", **told: Any) -> None:
        known = {"dispatch": "operator", "detail": detail} | told
        self.actions.append(RecordedAction("7", 0, stream, len(self.actions) + 1, name, known, 0, 0))

    def touch(self, stream: int, access: int, address: int = 0, size: int = SIZE, name: str = "op") -> None:
        self.add(
            name, stream, touches=[[access, address, 1, [size], [1]]], stack=f"in {name} at a.py:{len(self.actions)}"
        )

    def record(self, stream: int) -> int:
        number = next(self.events)
        self.add("record event", stream, f"event {number}")
        return number

    def wait(self, event: int, stream: int) -> None:
        self.add("wait for event", stream, f"event {event}")

    def host_waits(self, event: int, name: str = "host wait") -> None:
        self.add(name, 0, f"event {event}")

    def races(self) -> list[tuple[int, int]]:
        """The numbers of the tasks of each race."""
        found = races(RecordedRun({"7": tuple(self.actions)}))
        return [(race.first.action.number, race.second.action.number) for race in found]


@pytest.mark.parametrize(
    ("first", "second", "is_race"),
    [(WRITTEN, READ, True), (READ, CHANGED, True), (CHANGED, WRITTEN, True), (READ, READ, False)],
)
def test_two_streams_race_for_the_same_bytes_if_one_writes(first, second, is_race):
    host = Host()
    host.touch(1, first)
    host.touch(2, second)
    host.touch(3, second, address=SIZE)
    assert host.races() == ([(1, 2)] if is_race else [])


def test_a_stream_does_one_task_after_the_other():
    host = Host()
    host.touch(1, WRITTEN)
    host.touch(1, CHANGED)
    assert host.races() == []


def test_events_order_what_was_before_them_and_nothing_else():
    host = Host()
    host.touch(1, WRITTEN)
    event = host.record(1)
    host.touch(1, WRITTEN, address=SIZE)
    host.wait(event, 2)
    host.touch(2, READ)
    assert host.races() == []
    host.touch(2, READ, address=SIZE)
    assert host.races() == [(3, 6)]


def test_order_goes_on_through_further_streams():
    host = Host()
    host.touch(1, WRITTEN)
    host.wait(host.record(1), 2)
    host.wait(host.record(2), 3)
    host.touch(3, WRITTEN)
    assert host.races() == []


@pytest.mark.parametrize("name", ["host wait", "host query"])
def test_what_the_host_knows_comes_before_what_it_then_puts_on_any_stream(name):
    host = Host()
    host.touch(1, WRITTEN)
    event = host.record(1)
    host.touch(2, READ)
    host.host_waits(event, name)
    host.touch(2, CHANGED)
    host.touch(3, READ)
    assert host.races() == [(1, 3), (5, 6)]


def test_the_host_itself_writes_and_frees_too_early():
    host = Host()
    host.touch(1, READ)
    event = host.record(1)
    host.touch(0, WRITTEN, name="aclrtFree")
    assert host.races() == [(1, 3)]
    host = Host()
    host.touch(1, READ)
    event = host.record(1)
    host.host_waits(event)
    host.touch(0, WRITTEN, name="aclrtFree")
    host.touch(2, WRITTEN)
    assert host.races() == []


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("touch"),
            st.integers(1, 3),
            st.sampled_from((READ, WRITTEN, CHANGED)),
            st.tuples(st.integers(0, 12), st.integers(1, 8), st.sampled_from((1, 2))),
        ),
        st.tuples(st.just("order"), st.integers(0, 3), st.integers(1, 3), st.none()),
    ),
    max_size=25,
)


@given(STEPS)
def test_a_touch_races_if_an_earlier_one_of_the_same_bytes_does_not_come_before_it(steps):
    """``before``: all tasks that come before a task, by their numbers, and so for each stream and for the host."""
    host = Host()
    before: dict[int, set[int]] = {}
    of_stream: dict[int, set[int]] = {stream: set() for stream in range(4)}
    bytes_of: dict[int, tuple[int, set[int]]] = {}
    racing = set()
    for what, one, other, place in steps:
        if what == "order":
            # Stream ``other`` has put all it has before stream ``one``, or the host (0), goes on.
            event = host.record(other)
            if one:
                host.wait(event, one)
                of_stream[one] |= of_stream[0]
            else:
                host.host_waits(event)
            of_stream[one] |= of_stream[other] | of_stream[0]
            continue
        first, count, step = place
        touches = [[other, first, 1, [count], [step]]]
        host.add("op", one, touches=touches, stack=f"in op at a.py:{len(host.actions)}")
        number = len(host.actions)
        before[number] = of_stream[one] | of_stream[0]
        bytes_of[number] = (other, {first + index * step for index in range(count)})
        for old, (access, touched) in bytes_of.items():
            shared = touched & bytes_of[number][1] and (access, other) != (READ, READ)
            if old != number and old not in before[number] and shared:
                racing.add(number)
        of_stream[one] = before[number] | {number}
    assert {second for _, second in host.races()} == racing


def test_what_a_strided_touch_leaves_out_and_what_a_reader_comes_after_is_not_forgotten():
    host = Host()
    host.touch(1, WRITTEN, size=8)
    host.add("op", 1, touches=[[WRITTEN, 0, 1, [4], [2]]], stack="in op at a.py:1")
    host.touch(2, READ, address=1, size=1)
    assert host.races() == [(1, 3)]
    host = Host()
    host.touch(1, WRITTEN)
    host.touch(1, READ)
    host.touch(2, READ)
    assert host.races() == [(1, 3)]


def test_a_later_writer_does_not_hide_an_earlier_one_that_another_stream_races_with():
    host = Host()
    host.touch(1, WRITTEN, size=2 * SIZE)
    event = host.record(1)
    host.touch(1, WRITTEN, size=SIZE)
    host.wait(event, 2)
    host.touch(2, READ, address=SIZE)
    assert host.races() == []
    host.touch(2, READ)
    assert host.races() == [(3, 6)]


def test_a_place_in_the_program_is_told_once_and_with_its_stack():
    host = Host()
    for _ in range(3):
        for stream in (1, 2):
            host.add("op", stream, touches=[[WRITTEN, 4096, 4, [8], [1]]], stack=f"in f{stream} at a.py:{stream}")
    (race, other) = races(RecordedRun({"7": tuple(host.actions)}))
    assert str(race).splitlines()[1:] == ["  op: in f1 at a.py:1", "  op: in f2 at a.py:2"]
    assert "up to 32 bytes at 0x1000 of NPU 0, process 7" in str(race)
    assert str(other).splitlines()[1:] == ["  op: in f2 at a.py:2", "  op: in f1 at a.py:1"]
    lines = [*race_report([race] * 5, 2)]
    assert [line.split(":")[0] for line in lines] == ["race", "race", "and further ones", "What to do"]
    assert [*race_report([], 2)] == []


TENSORS = st.builds(
    lambda first, item, dims: Bytes(
        first,
        first + sum((size - 1) * stride * item for size, stride in dims) + item,
        item,
        tuple(sorted(((size, stride * item) for size, stride in dims), key=lambda dim: -dim[1])),
    ),
    st.integers(0, 60),
    st.sampled_from([1, 2, 4]),
    st.lists(st.tuples(st.integers(2, 4), st.integers(1, 9)), max_size=3),
)


def bytes_of(tensor: Bytes) -> set[int]:
    found = {tensor.first}
    for size, stride in tensor.dims:
        found = {byte + step * stride for byte in found for step in range(size)}
    return {byte + offset for byte in found for offset in range(tensor.item)}


@given(TENSORS, TENSORS)
@example(Bytes(0, 24, 2, ((2, 10), (2, 8), (3, 2))), Bytes(6, 7, 1, ()))
def test_strided_tensors_overlap_where_their_bytes_do(one, other):
    assert overlap(one, other) == overlap(other, one) == bool(bytes_of(one) & bytes_of(other))


def test_a_tensor_of_too_many_pieces_is_taken_for_its_range(monkeypatch):
    columns = Bytes(0, 4 * 31 + 1, 1, ((32, 4),))
    others = Bytes(1, 4 * 31 + 2, 1, ((32, 4),))
    assert not overlap(columns, others)
    monkeypatch.setattr(module, "MOST_PIECES", 8)
    assert overlap(columns, others)
