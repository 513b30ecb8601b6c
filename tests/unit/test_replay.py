"""Replays of small recorded runs against sums made by hand."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_npu.cli.prediction.sensitivity import CONTENTION, sensitivities, worse
from ds_npu.simulator.replay.recording import RecordedAction, RecordedRun, read_recording
from ds_npu.simulator.replay.replay import Replay
from ds_npu.topology.machine import A2

MACHINE = replace(
    A2,
    kernel=1e-6,
    message=2e-6,
    memory=((1, 1e12),),
    host=1e9,
    port=4e9,
    link=2e9,
    network=1e9,
    hop=1e-6,
    dispatch=10e-6,
    dispatch_collective=20e-6,
    dispatch_event=1e-6,
    launch=3e-6,
)
"""A streaming operator of n MB takes 1 + n us, a dispatched one begins 13 us after the one before it."""
MB = 10**6


class Host:
    """Writes down what the host of one process does."""

    def __init__(self, process: str = "one", npu: int = 0) -> None:
        self.process, self.npu = process, npu
        self.actions: list[RecordedAction] = []
        self.events = itertools.count(1)

    def add(self, name: str, stream: int, dispatch: str, detail: str = "", **told: Any) -> RecordedAction:
        told = {"dispatch": dispatch, "detail": detail} | told
        action = RecordedAction(self.process, 0, stream, len(self.actions), name, told, 0, 0)
        self.actions.append(action)
        return action

    def streaming(self, size_mb: int, stream: int = 1) -> RecordedAction:
        """An operator of 1 + ``size_mb`` us."""
        return self.add("op", stream, "operator", kind="streaming", flop=0, read=size_mb * MB, written=0)

    def cube(self, stream: int = 1) -> RecordedAction:
        """A product of one round of tiles, with no bytes to speak of."""
        return self.add(
            "mm", stream, "operator", kind="cube", flop=1, read=1, written=0, products=[128, 256, 4096, 2, 1]
        )

    def record(self, stream: int = 1) -> int:
        number = next(self.events)
        self.add("record event", stream, "event", f"event {number}")
        return number

    def wait(self, event: int, stream: int) -> RecordedAction:
        return self.add("wait for event", stream, "event", f"event {event}")

    def host_wait(self, event: int) -> RecordedAction:
        return self.add("host wait", 0, "none", f"event {event}")

    def collective(self, call: int, npus: list[int], size: int, stream: int = 1, group: str = "g") -> RecordedAction:
        """An all-gather of ``size`` bytes in all, without bytes of memory to speak of."""
        told = {
            "communicator": group,
            "rank": npus.index(self.npu),
            "npus": npus,
            "call": call,
            "collective": "all_gather",
        }
        return self.add(
            "gather", stream, "collective", kind="collective", flop=0, read=0, written=0, bytes=size, **told
        )

    def messages(self, npus: list[int], *messages: tuple[int, int, int, int], stream: int = 1) -> RecordedAction:
        told = {
            "communicator": "m",
            "rank": npus.index(self.npu),
            "npus": npus,
            "messages": [list(m) for m in messages],
        }
        return self.add("message", stream, "collective", kind="message", flop=0, read=0, written=0, **told)


def times(*hosts: Host, **options: bool) -> dict[int, tuple[float, float]]:
    """Microseconds of begin and end, by the identity of each action."""
    recording = RecordedRun({host.process: tuple(host.actions) for host in hosts})
    spans = Replay(recording, MACHINE, **options).run()
    assert len(spans) == sum(len(host.actions) for host in hosts)
    return {id(span.action): (span.begun / 1e3, span.ended / 1e3) for span in spans}


def test_a_slow_host_and_a_slow_device():
    host = Host()
    short, long, behind = host.streaming(4), host.streaming(49), host.streaming(4)
    found = times(host)
    assert found[id(short)] == (13, 18)
    assert found[id(long)] == (23, 73)
    assert found[id(behind)] == (73, 78)


def test_the_thread_that_launches_may_be_slower_than_the_host():
    host = Host()
    first, *_, last = [host.wait(host.record(), 1) for _ in range(4)]
    found = times(host)
    # Each is launched 3 us after the one before it; the first record at 4.
    assert found[id(first)] == (7, 7) and found[id(last)] == (25, 25)
    # Without a queue the host needs 1 + 3 us for each.
    assert times(host, has_queue=False)[id(last)] == (32, 32)


def test_forks_join_at_the_later_end():
    host = Host()
    host.streaming(99)
    begun = host.record()
    host.wait(begun, 2)
    there, here = host.cube(2), host.cube(1)
    waited = host.wait(host.record(2), 1)
    behind = host.streaming(4)
    found = times(host)
    mm = 1 + 1e6 * MACHINE.product_seconds(128, 256, 4096, 2)
    # Both need all cube cores, but for the least time of a kernel, and go on at the same rate.
    assert found[id(there)] == found[id(here)] == pytest.approx((113, 113 + 2 * (mm - 1)), abs=2e-3)
    assert times(host, shares=False)[id(here)] == pytest.approx((113, 113 + mm), abs=1e-3)
    assert found[id(waited)][1] == found[id(there)][1] and found[id(behind)][0] >= found[id(waited)][1]


def test_two_streams_share_memory():
    host = Host()
    one, other = host.streaming(99, 1), host.streaming(99, 2)
    found = times(host)
    # Alone 100 us with 0.99 of the memory. The first has 10 us alone; then both go on at 1 / 1.98.
    assert found[id(one)] == pytest.approx((13, 23 + 90 * 1.98), abs=1e-3)
    # The second has done 90 us by then, and 10 are left.
    assert found[id(other)] == pytest.approx((23, 23 + 90 * 1.98 + 10), abs=1e-3)


def test_cube_and_memory_do_not_slow_each_other_down():
    host = Host()
    stream, product = host.streaming(99, 1), host.cube(2)
    found = times(host)
    assert found[id(stream)] == (13, 113) and found == times(host, shares=False)
    assert found[id(product)][0] == 23


def test_a_collective_begins_with_its_last_rank():
    hosts = first, second = Host("one", 0), Host("two", 1)
    early = first.collective(1, [0, 1], 8000)
    second.streaming(99)
    late = second.collective(1, [0, 1], 8000)
    found = times(*hosts)
    # Half of the bytes go over a link of 2 GB/s: 2 us, and 2 us of any collective.
    assert found[id(early)] == found[id(late)] == pytest.approx((113, 117), abs=1e-3)


def test_collectives_of_two_groups_share_a_link_and_those_of_one_come_one_after_the_other():
    hosts = Host("one", 0), Host("two", 1)
    calls = [[host.collective(1, [0, 1], 800_000, 1), host.collective(1, [0, 1], 800_000, 2, "h")] for host in hosts]
    found = times(*hosts)
    # Alone 2 + 200 us, with 200/202 of the link. The second begins 20 us behind the first.
    slow = 400 / 202
    first_end = 23 + 20 + 182 * slow
    assert found[id(calls[0][0])] == found[id(calls[1][0])] == pytest.approx((23, first_end), abs=2e-3)
    assert found[id(calls[0][1])] == pytest.approx((43, first_end + 20), abs=2e-3)
    hosts = Host("one", 0), Host("two", 1)
    calls = [[host.collective(call, [0, 1], 800_000, call) for call in (1, 2)] for host in hosts]
    found = times(*hosts)
    assert found[id(calls[0][1])] == found[id(calls[1][1])] == pytest.approx((225, 427), abs=1e-3)


def test_messages_of_a_task_go_at_the_same_time_and_begin_with_both_ends():
    hosts = one, two, three = Host("one", 0), Host("two", 1), Host("three", 8)
    npus = [0, 1, 8]
    sent = one.messages(npus, (1, 1, 1, 20_000), (1, 2, 1, 20_000))
    two.streaming(99)
    near, far = two.messages(npus, (0, 0, 1, 20_000)), three.messages(npus, (0, 0, 1, 20_000))
    found = times(*hosts)
    # To the other node 2 + 20 us from 23 on; to the same one 2 + 10 us, when the receiver has come.
    assert found[id(far)] == pytest.approx((23, 45), abs=1e-3)
    assert found[id(near)] == pytest.approx((113, 125), abs=1e-3)
    assert found[id(sent)][1] == pytest.approx(125, abs=1e-3)


def test_the_host_waits_for_events_and_for_its_own_copies():
    host = Host()
    host.streaming(99)
    wait = host.host_wait(host.record())
    copy = host.add("aclrtMemcpy", 0, "none", kind="copy", flop=0, read=MB // 2, written=MB // 2, host=9000)
    behind = host.streaming(4)
    found = times(host)
    assert found[id(wait)] == (11, 113)
    assert found[id(copy)] == (113, 123)
    assert found[id(behind)] == (136, 141)


def test_ranks_that_were_not_recorded_count_as_ready():
    host = Host("one", 0)
    call = host.collective(1, [0, 1, 2, 3], 8000)
    # 2 us, and 2000 bytes over each of 3 links: 6000 bytes over a port of 4 GB/s.
    assert times(host)[id(call)] == pytest.approx((23, 26.5), abs=1e-3)


def test_a_replay_is_the_same_each_time():
    def hosts() -> list[Host]:
        found = [Host("one", 0), Host("two", 1)]
        for host in found:
            for call in range(1, 20):
                host.streaming(call, 1 + call % 3)
                host.collective(call, [0, 1], 1000 * call, 4)
                host.cube(2)
        return found

    one, other = hosts(), hosts()
    assert list(times(*one).values()) == list(times(*other).values())


def test_a_record_that_was_cut_short_is_an_error():
    host = Host("one", 0)
    host.collective(1, [0, 1], 8000)
    host.host_wait(host.record())
    other = Host("two", 1)
    other.collective(1, [0, 1], 8000)
    assert times(host, other)
    recording = RecordedRun({"one": tuple(host.actions), "two": ()})
    # One of two recorded ranks never comes.
    late = Host("two", 1)
    late.wait(late.record(), 1)
    late.actions.insert(0, late.actions.pop())
    late.collective(1, [0, 1], 8000)
    recording = RecordedRun({"one": tuple(host.actions), "two": tuple(late.actions)})
    with pytest.raises(ValueError, match="ends before what its hosts wait for: host wait event 1"):
        Replay(recording, MACHINE).run()


def test_files_that_are_no_record_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no record of a run"):
        read_recording(tmp_path)
    (tmp_path / "1.json").write_text("[\n" + json.dumps({"name": "op"}) + ",\n")
    with pytest.raises(ValueError, match=r"1.json, line 2: no record of a task"):
        read_recording(tmp_path)


def test_a_step_depends_on_each_number_of_the_machine_by_its_part_of_the_step():
    host = Host()
    host.streaming(87)
    told: list[str] = []
    found = {
        each.name: each
        for each in sensitivities(RecordedRun({"one": tuple(host.actions)}), MACHINE, 101e-6, told.append)
    }
    # 10 us to dispatch, 3 to launch, 1 for a kernel and 87 for its bytes, of which each becomes 10 % worse.
    assert found["dispatch"].growth == pytest.approx(1 / 101) and found["launch"].growth == pytest.approx(
        0.3 / 101, abs=1e-5
    )
    assert found["memory"].growth == pytest.approx((87 / 0.9 - 87) / 101, abs=1e-5)
    assert found["matmul"].growth == found[CONTENTION].growth == 0 and found["memory"].evidence == "derived, trust low"
    assert len(told) == len(found)
    assert worse(MACHINE, "memory").memory == ((1, pytest.approx(0.9e12)),) and worse(
        MACHINE, "hop"
    ).hop == pytest.approx(1.1e-6)


def test_a_full_stream_holds_up_what_launches_and_a_full_queue_the_host():
    host = Host()
    for _ in range(5):
        host.streaming(99)
    others = [host.streaming(0, stream) for stream in (2, 3)]
    recording = RecordedRun({"one": tuple(host.actions)})

    def begun(**sizes: int) -> list[float]:
        """When the other streams begin their task, in microseconds."""
        spans = Replay(recording, replace(MACHINE, **sizes), shares=False).run()
        found = {id(span.action): span.begun / 1e3 for span in spans}
        return [found[id(other)] for other in others]

    # Dispatched at 60 and 70.
    assert begun() == [63, 73]
    # Two fit on the stream: its third task is launched when the first has ended, at 113, its fifth at 313.
    assert begun(stream_tasks=2) == [319, 322]
    # And only one into the queue: the last is dispatched when the one before it is launched.
    assert begun(stream_tasks=2, queue_tasks=1) == [319, 329]


def test_streams_that_never_have_room_again_are_an_error():
    host = Host()
    host.wait(1, 1)
    host.streaming(1)
    host.record(2)
    recording = RecordedRun({"one": tuple(host.actions)})
    assert len(Replay(recording, MACHINE).run()) == 3
    with pytest.raises(ValueError, match="the record ends before what its hosts wait for: op"):
        Replay(recording, replace(MACHINE, stream_tasks=1)).run()
