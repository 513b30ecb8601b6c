"""The watch over steps speaks once of a standstill, after a time that the steps themselves give, and never more."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from ds_npu.features.watch import stalls
from ds_npu.features.watch.stalls import LEAST_SECONDS, MOST_REPORTS, PAUSE_SECONDS, StallWatch, watch_for_stalls
from ds_npu.plain_engines import note_plain_engine


class Engine:
    """What is read of DeepSpeed's."""

    def __init__(self) -> None:
        self.global_steps, self.micro_steps, self.module = 0, 0, torch.nn.Linear(1, 1)


class JointCalls:
    """Those of this process."""

    def __init__(self) -> None:
        self.told = 0

    def say_where(self) -> None:
        self.told += 1


def watch_after_steps(seconds: float, steps: int = 6, factor: int = 10) -> StallWatch:
    """A watch that has seen steps of so many ``seconds``; the clock stands at ``steps`` * ``seconds``."""
    watch = StallWatch(factor, "rank 1 of 4")
    for step in range(steps + 1):
        assert watch.look(step * seconds, (step, step), is_training=True) is None
    return watch


@pytest.mark.parametrize(("seconds", "limit"), [(1.0, LEAST_SECONDS), (30.0, 300.0)])
def test_a_standstill_is_said_once(seconds, limit):
    watch = watch_after_steps(seconds)
    begun = 6 * seconds
    assert watch.look(begun + limit - 0.1, (6, 6), is_training=True) is None
    said = watch.look(begun + limit, (6, 6), is_training=True)
    assert said.startswith(f"rank 1 of 4 has stood still for {limit:.0f} s, after step 6 (the median step takes")
    assert "test_a_standstill_is_said_once: said = watch.look(" in said
    assert watch.look(begun + 9 * limit, (6, 6), is_training=True) is None
    assert watch.look(begun + 9 * limit + 1, (6, 7), is_training=True).startswith("rank 1 of 4 goes on, after ")


def test_micro_batches_are_signs_of_life():
    watch = watch_after_steps(20.0)
    for second in range(0, 1000, 100):
        assert watch.look(120.0 + second, (6, 7 + second), is_training=True) is None


def test_before_the_first_steps_and_in_evaluation_it_is_patient():
    first = watch_after_steps(1.0, steps=2)
    assert first.look(2.0 + PAUSE_SECONDS - 0.1, (2, 2), is_training=True) is None
    assert "no step has ended" in first.look(2.0 + PAUSE_SECONDS, (2, 2), is_training=True)
    assert watch_after_steps(1.0).look(6.0 + PAUSE_SECONDS - 0.1, (6, 6), is_training=False) is None


def test_while_a_checkpoint_is_written_it_is_patient():
    watch = watch_after_steps(1.0)

    def save_checkpoint(now: float) -> str | None:
        return watch.look(now, (6, 6), is_training=True)

    assert save_checkpoint(6.0 + PAUSE_SECONDS - 0.1) is None
    assert "save_checkpoint: " in save_checkpoint(6.0 + PAUSE_SECONDS)


def test_a_pause_is_called_by_its_name():
    """A long save is no standstill."""
    watch = watch_after_steps(1.0)

    def save_checkpoint(now: float) -> str | None:
        return watch.look(now, (6, 6), is_training=True)

    assert save_checkpoint(6.0 + PAUSE_SECONDS).startswith("rank 1 of 4 has been in save_checkpoint for 600 s, after")
    said = watch_after_steps(1.0).look(6.0 + PAUSE_SECONDS, (6, 6), is_training=False)
    assert said.startswith("rank 1 of 4 has evaluated for 600 s, after step 6 (")


def test_an_engine_that_the_script_has_finished_with_does_not_stand_still():
    finished, used = watch_after_steps(1.0), watch_after_steps(1.0)
    for second in range(7, 1000):
        assert finished.look(second, (6, 6), is_training=True, last_moved=used.moved) is None
        assert used.look(second, (second, second), is_training=True, last_moved=finished.moved) is None
    # A step of the one that is used hangs: that one says so, and only that one.
    said = [
        watch.look(999 + LEAST_SECONDS, counters, is_training=True, last_moved=other.moved)
        for watch, other, counters in [(finished, used, (6, 6)), (used, finished, (999, 999))]
    ]
    assert said[0] is None and said[1].startswith("rank 1 of 4 has stood still for 60 s, after step 999")
    # The other engine is gone: the time that the script used it for does not count.
    begun = 999 + LEAST_SECONDS
    assert finished.look(begun + LEAST_SECONDS - 1, (6, 6), is_training=True) is None
    assert "has stood still for 60 s, after step 6" in finished.look(begun + LEAST_SECONDS, (6, 6), is_training=True)


def test_a_factor_of_0_never_speaks():
    assert watch_after_steps(1.0, factor=0).look(1e9, (6, 6), is_training=True) is None


def test_of_a_deep_stack_both_ends_are_shown():
    watch = watch_after_steps(1.0)

    def deeper(levels: int) -> str | None:
        return deeper(levels - 1) if levels else watch.look(6.0 + LEAST_SECONDS, (6, 6), is_training=True)

    said = deeper(40).splitlines()
    begins, ends = said[1 : 1 + stalls.OUTERMOST_FRAMES], said[2 + stalls.OUTERMOST_FRAMES :]
    assert not any(" in deeper: " in line for line in begins) and " more" in said[1 + stalls.OUTERMOST_FRAMES]
    inner = stalls.MOST_FRAMES - stalls.OUTERMOST_FRAMES
    assert all(" in deeper: " in line for line in ends[: inner - 1]) and " in look: " in ends[inner - 1]


def test_it_speaks_three_times_at_most():
    watch, now, said = watch_after_steps(1.0), 6.0, []
    for step in range(7, 7 + 2 * MOST_REPORTS):
        now += LEAST_SECONDS
        said.append(watch.look(now, (step - 1, step - 1), is_training=True))
        watch.look(now + 1, (step, step), is_training=True)
        now += 1
    spoken = [each for each in said if each]
    assert len(spoken) == MOST_REPORTS and "says no more of this" in spoken[-1]


def test_an_engine_that_the_script_has_destroyed_is_not_reported_and_another_one_is_again():
    destroyed, other = watch_after_steps(1.0), watch_after_steps(0.9)
    assert other.look(6.0 + LEAST_SECONDS, (6, 6), is_training=True, last_moved=destroyed.moved) is None
    destroyed.end()
    begun = 6.0 + LEAST_SECONDS
    assert destroyed.look(begun + 2 * PAUSE_SECONDS, (6, 6), is_training=True, last_moved=other.moved) is None
    said = other.look(begun + LEAST_SECONDS, (6, 6), is_training=True, last_moved=destroyed.moved)
    assert said.startswith("rank 1 of 4 has stood still for 60 s, after step 6")


def test_one_thread_looks_after_two_engines(monkeypatch, capfd):
    monkeypatch.setattr(stalls, "LOOK_EVERY_SECONDS", 0.02)
    engines = finished, used = [Engine(), Engine()]
    thread, again = [
        watch_for_stalls(each, StallWatch(2, "rank 0 of 1", least=0.3, pause=0.6), lambda: None) for each in engines
    ]
    assert thread is again
    for engine, steps in ((finished, 5), (used, 20)):
        for _ in range(steps):
            time.sleep(0.05)
            engine.global_steps += 1
    time.sleep(0.9)  # the standstill of the second
    said = capfd.readouterr().err
    assert said.count("has stood still") == 1 and ", after step 20 (" in said
    del engines, engine, finished, used
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_an_engine_tells_where_it_stands_while_another_one_moves(monkeypatch):
    """A rank may wait for this one in a call of the engine that stands still."""
    monkeypatch.setattr(stalls, "LOOK_EVERY_SECONDS", 0.02)
    monkeypatch.setattr(stalls, "STILL_SECONDS", 0.6)
    joint_calls, engines = JointCalls(), [Engine(), Engine(), Engine()]
    used = engines[0]
    for engine in engines:
        when_still = (lambda: None) if engine is used else joint_calls.say_where
        thread = watch_for_stalls(engine, StallWatch(2, "rank 0 of 1"), when_still)
    for _ in range(30):
        time.sleep(0.05)
        used.global_steps += 1
    engines.clear()
    del engine, used
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
    # Every 0.6 s, and once for the two engines that share them.
    assert 1 <= joint_calls.told <= 3


def test_an_engine_without_the_section_is_seen(monkeypatch, capfd):
    monkeypatch.setattr(stalls, "LOOK_EVERY_SECONDS", 0.02)
    finished, used = Engine(), Engine()
    note_plain_engine(used)
    thread = watch_for_stalls(finished, StallWatch(2, "rank 0 of 1", least=0.3, pause=0.6), lambda: None)
    for engine, steps in ((finished, 5), (used, 20)):
        for _ in range(steps):
            time.sleep(0.05)
            engine.global_steps += 1
    del finished, engine
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
    assert "has stood still" not in capfd.readouterr().err


def test_the_thread_prints_the_stacks_of_all_threads_and_ends_with_the_engine(monkeypatch, capfd):
    monkeypatch.setattr(stalls, "LOOK_EVERY_SECONDS", 0.02)
    engine = Engine()
    done = threading.Event()
    other = threading.Thread(target=done.wait, name="a loader", daemon=True)
    other.start()
    thread = watch_for_stalls(engine, StallWatch(2, "rank 0 of 1", least=0.2, pause=0.5), lambda: None)
    for _ in range(5):
        time.sleep(0.05)
        engine.global_steps += 1
    time.sleep(1.0)  # the standstill
    done.set()
    other.join()
    said = capfd.readouterr().err
    assert (
        said.count("[ds_npu] WARNING: rank 0 of 1 has stood still") == 1 and "time.sleep(1.0)  # the standstill" in said
    )
    assert "  thread a loader" in said
    del engine
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
