"""Streams run on their own; events order them; time and callbacks work."""

import torch

LONG = 1 << 23
"""Elements of a sum that takes an NPU longer than the host needs to dispatch it."""


def keep_busy(times=30):
    """Queue work on the current stream that takes longer, in virtual time, than the host needs for all of it."""
    value = torch.ones(LONG, device="cpu").npu()
    for _ in range(times):
        value = value + value
    return value


def test_streams_do_not_wait_for_each_other():
    slow, fast = torch.npu.Stream(), torch.npu.Stream()
    small = torch.ones(4, device="cpu").npu()
    torch.npu.synchronize()
    with torch.npu.stream(slow):
        keep_busy()
        slow_done = slow.record_event()
    with torch.npu.stream(fast):
        doubled = small + small
        fast_done = fast.record_event()
    fast_done.synchronize()
    assert not slow_done.query()
    assert not slow.query()
    slow_done.synchronize()
    assert slow_done.query()
    assert doubled.cpu().tolist() == [2, 2, 2, 2]


def test_a_stream_that_waits_for_an_event_sees_what_was_done_before_it():
    first, second = torch.npu.Stream(), torch.npu.Stream()
    torch.npu.synchronize()
    with torch.npu.stream(first):
        value = keep_busy(20)
        recorded = first.record_event()
    second.wait_event(recorded)
    with torch.npu.stream(second):
        result = value + value
    value.record_stream(second)
    second.synchronize()
    assert result.cpu().unique().tolist() == [2.0**21]


def test_an_event_that_was_recorded_anew_is_waited_for_as_it_then_was():
    stream = torch.npu.Stream()
    event = torch.npu.Event()
    with torch.npu.stream(stream):
        event.record(stream)
        keep_busy(5)
        event.record(stream)
    event.synchronize()
    assert stream.query()


def test_elapsed_time_is_that_of_the_work_between():
    start, middle, end = (torch.npu.Event(enable_timing=True) for _ in range(3))
    start.record()
    middle.record()
    keep_busy()
    end.record()
    torch.npu.synchronize()
    assert 0 <= start.elapsed_time(middle) < middle.elapsed_time(end)
    assert 1 < middle.elapsed_time(end) < 60_000


def test_the_host_may_run_ahead_and_pinned_memory_is_known_as_such():
    pinned = torch.arange(1024, dtype=torch.float32).pin_memory()
    assert pinned.is_pinned()
    assert not torch.arange(4).is_pinned()
    there = pinned.to("npu", non_blocking=True)
    back = torch.empty(1024).pin_memory()
    back.copy_(there + there, non_blocking=True)
    torch.npu.synchronize()
    assert torch.equal(back, 2 * pinned)


def test_the_default_stream_is_one_and_devices_have_their_own():
    value = torch.ones(8, device="cpu").to("npu:1")
    with torch.npu.device(1):
        assert torch.npu.current_stream() == torch.npu.default_stream() != torch.npu.default_stream(0)
    assert (value + value).device == torch.device("npu", 1)
    assert (value + value).cpu().tolist() == [2.0] * 8
    assert value.to("npu:0").cpu().tolist() == [1.0] * 8


def test_who_waits_for_an_event_waits_for_the_record_it_saw_not_for_a_later_one_on_another_stream():
    slow, fast, reader = torch.npu.Stream(), torch.npu.Stream(), torch.npu.Stream()
    event = torch.npu.Event()
    torch.npu.synchronize()
    with torch.npu.stream(slow):
        value = keep_busy(20)
        event.record(slow)
    reader.wait_event(event)
    event.record(fast)
    value.record_stream(reader)
    with torch.npu.stream(reader):
        result = value + value
    reader.synchronize()
    assert result.cpu().unique().tolist() == [2.0**21]
