"""A thread that notices when no step ends, and prints where this rank stands.

It reads DeepSpeed's own counters from outside, so that a step costs nothing. It only reports: compiling, evaluating
or saving may take as long as they do. A call that holds Python's lock while it waits is not seen. Of several engines in
one process only the one that moved last is reported: the script does not use the others now.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ds_npu.plain_engines import plain_counters
from ds_npu.stacks import stacks
from ds_npu.zero_ext.training_engine import TrainingEngine

LEAST_SECONDS = 60.0
PAUSE_SECONDS = 600.0
"""The most time before the first steps have ended, in evaluation, and while a checkpoint is written or read."""
PAUSES = ("save_checkpoint", "load_checkpoint", "save_16bit_model", "save_model", "evaluate", "evaluation_loop")
"""Functions of DeepSpeed, of the Trainer and of many scripts in which no step ends."""
MOST_REPORTS = 3
LOOK_EVERY_SECONDS = 1.0
STILL_SECONDS = 5.0
REMEMBERED_STEPS = 50
KNOWN_AFTER_STEPS = 3
MOST_FRAMES = 25
OUTERMOST_FRAMES = 5
"""How many of MOST_FRAMES are outermost frames, the script's own lines."""
MOST_THREADS = 6
FRAMES_OF_OTHERS = 4


@dataclass(eq=False)
class StallWatch:
    """The state of one engine's watch; ``look`` is called regularly with the clock's time in seconds."""

    factor: int
    """How many median steps count as a stall; 0: no reports, but watches of other engines see this one move."""
    rank_text: str
    """This rank and the number of ranks, in words."""
    least: float = LEAST_SECONDS
    pause: float = PAUSE_SECONDS
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))
    counters: tuple[int, int] = (-1, -1)
    """Optimizer steps and micro-batches that have ended, when last looked."""
    moved: float = 0.0
    """When the counters last changed."""
    unused: float = 0.0
    """When the script was last seen to use another engine."""
    stepped: float | None = None
    """When an optimizer step last ended."""
    reports: int = 0
    is_reported: bool = False

    def look(self, now: float, counters: tuple[int, int], *, is_training: bool, last_moved: float = 0.0) -> str | None:
        """The message, if any, for an engine with these ``counters``; ``last_moved``: when any engine last moved."""
        if counters != self.counters:
            message = f"{self.rank_text} goes on, after {now - self.moved:.0f} s" if self.is_reported else None
            self._note(now, counters)
            return message
        if last_moved > self.moved:
            self.unused = now
        silence = now - max(self.moved, self.unused)
        if self.is_reported or self.reports == MOST_REPORTS or silence < self.limit(is_training=is_training):
            return None
        every = stacks()
        stack = every.get(threading.main_thread().ident or 0, traceback.StackSummary())
        pause = next((frame.name for frame in stack if frame.name in PAUSES), None)
        if pause is not None and silence < self.pause:
            return None
        self.is_reported = True
        self.reports = self.reports + 1
        median = f"the median step takes {self.median:.2g} s" if self.median else "no step has ended"
        last = "; says no more of this" if self.reports == MOST_REPORTS else ""
        what = "stood still" if is_training else "evaluated"
        what = what if pause is None else f"been in {pause}"
        head = (
            f"{self.rank_text} has {what} for {silence:.0f} s, after step {counters[0]} ({median}){last}. It stands at"
        )
        return "\n".join([head, *_lines(stack, MOST_FRAMES, OUTERMOST_FRAMES), *_other_threads(every)])

    @property
    def median(self) -> float | None:
        """Seconds of a step; None before enough of them have ended."""
        return statistics.median(self.durations) if len(self.durations) >= KNOWN_AFTER_STEPS else None

    def limit(self, *, is_training: bool) -> float:
        """After how many seconds without a change the rank says where it stands."""
        if self.factor == 0:
            return math.inf
        if self.median is None or not is_training:
            return self.pause
        return max(self.least, self.factor * self.median)

    def end(self) -> None:
        """The script has destroyed the engine: report nothing any more, and let others be reported again."""
        self.factor, self.moved = 0, 0.0

    def _note(self, now: float, counters: tuple[int, int]) -> None:
        steps = counters[0] - self.counters[0]
        if steps > 0:
            if self.stepped is not None:
                self.durations.append((now - self.stepped) / steps)
            self.stepped = now
        self.counters = counters
        self.moved = now
        self.is_reported = False


@dataclass(eq=False)
class _Watched:
    """An engine, its watch, and what is called while it does not move."""

    engine: weakref.ref[TrainingEngine]
    watch: StallWatch
    when_still: Callable[[], None]


class _Lookout:
    """The thread that looks after all engines of this process; it ends with the last of them."""

    def __init__(self) -> None:
        self.watched: list[_Watched] = []
        self.thread: threading.Thread | None = None
        self.changing = threading.Lock()
        """Held while the two are changed."""

    def add(self, watched: _Watched) -> threading.Thread:
        with self.changing:
            self.watched.append(watched)
            # The threads of a process do not live on in one that is forked from it.
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self._look_again_and_again, name="ds_npu watch", daemon=True)
                self.thread.start()
            return self.thread

    def _look_again_and_again(self) -> None:
        asked = time.monotonic()
        plain = StallWatch(0, "engines without the section", counters=plain_counters())
        while True:
            time.sleep(LOOK_EVERY_SECONDS)
            with self.changing:
                self.watched = watched = [each for each in self.watched if each.engine() is not None]
                if not watched:
                    self.thread = None
                    return
            plain.look(time.monotonic(), plain_counters(), is_training=True)
            last_moved = max(plain.moved, *(each.watch.moved for each in watched))
            for each in watched:
                _look_at(each, last_moved)
            if time.monotonic() - asked > STILL_SECONDS:
                asked = time.monotonic()
                # Engines of one world share their joint calls, which are told once.
                for when_still in {each.when_still for each in watched if asked - each.watch.moved > STILL_SECONDS}:
                    when_still()


_LOOKOUT = _Lookout()


def watch_for_stalls(engine: TrainingEngine, watch: StallWatch, when_still: Callable[[], None]) -> threading.Thread:
    """Look after ``engine``, a DeepSpeed engine, while it is there; returns the thread that does.

    ``when_still`` is called every STILL_SECONDS while the engine does not move.
    """
    watch.moved = time.monotonic()
    return _LOOKOUT.add(_Watched(weakref.ref(engine), watch, when_still))


def _look_at(watched: _Watched, last_moved: float) -> None:
    engine = watched.engine()
    if engine is None:
        return
    counters = (engine.global_steps, engine.micro_steps)
    is_training = engine.module.training
    del engine
    message = watched.watch.look(time.monotonic(), counters, is_training=is_training, last_moved=last_moved)
    if message is not None:
        os.write(2, f"[ds_npu] WARNING: {message}\n".encode())


def _lines(stack: traceback.StackSummary, most: int, outermost: int = 0) -> list[str]:
    """A line for each frame, the outermost first; beyond ``most``, frames behind the ``outermost`` are left out."""
    lines = [f"    {each.filename}:{each.lineno} in {each.name}: {each.line}" for each in stack]
    left_out = len(lines) - most
    return lines if left_out <= 0 else [*lines[:outermost], f"    ... {left_out} more", *lines[outermost + left_out :]]


def _other_threads(every: Mapping[int, traceback.StackSummary]) -> list[str]:
    others = [
        each for each in threading.enumerate() if each not in (threading.main_thread(), threading.current_thread())
    ]
    lines = []
    for thread in others[:MOST_THREADS]:
        if stack := every.get(thread.ident or 0):
            lines += [f"  thread {thread.name}", *_lines(stack, FRAMES_OF_OTHERS)]
    if len(others) > MOST_THREADS:
        lines.append(f"  and {len(others) - MOST_THREADS} more threads")
    return lines
