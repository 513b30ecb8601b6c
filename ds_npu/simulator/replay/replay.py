"""Computes a recorded run again, on any machine: a deterministic simulation of events in virtual time.

The host of each process dispatches its actions in their order and waits where it waited, and for room on a full
stream. Each stream runs its tasks one after the other. An event is reached in its stream's order; a collective begins
with its last rank and after the call before it, a message with both ends. Tasks that run at the same time share their
NPU's resources (resources.py). Ranks that were not recorded count as ready.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from ds_npu.simulator.replay.pricing import (
    Message,
    Price,
    dispatch_nanoseconds,
    message_price,
    messages_of,
    nanoseconds,
    price,
)
from ds_npu.simulator.replay.recording import RecordedAction, RecordedRun
from ds_npu.simulator.replay.resources import FluidJob, Resources
from ds_npu.topology.machine import Machine

EventKey = tuple[str, int | None]
"""An event by its process and number."""


@dataclass(frozen=True)
class Span:
    """When an action began and ended, in nanoseconds of virtual time."""

    action: RecordedAction
    begun: int
    ended: int
    ready: int
    """When its stream came to it; a collective or message may then wait for other ranks until ``begun``."""


@dataclass(eq=False)
class _Stream:
    device: tuple[str, int]
    waiting: deque[tuple[RecordedAction, int]] = field(default_factory=deque)
    """Its tasks with the times at which they are launched."""
    free: int = 0
    """When its last task ended."""
    runs: bool = False
    """Whether a task runs or is about to."""
    ready: int = 0
    """When the stream came to the task that it runs."""
    begun: int = 0
    left: int = 0
    """Messages of its task that are on their way."""
    holds: int = 0
    """Its tasks that have not ended."""
    held_back: tuple[_Host, RecordedAction] | None = None
    """The host that waits for room on the stream, and the task that it launches then."""


@dataclass(eq=False)
class _Host:
    actions: Iterator[RecordedAction]
    has_queue: bool
    """Whether a thread of its own launches tasks."""
    now: int = 0
    launched: int = 0
    """When the queue's thread launched its last task."""
    queued: deque[int] = field(default_factory=deque)
    """Launch times of the tasks that were dispatched last, at most as many as the queue holds."""
    waits: tuple[RecordedAction, int] | None = None
    """The action in which it waits for an event, and since when."""

    def launch(self, machine: Machine, dispatch: str, free_since: int) -> int:
        """Dispatch a task and launch it, not before ``free_since``.

        Returns the time at which its stream may begin it.
        """
        launching = nanoseconds(machine.launch)
        self.now += dispatch_nanoseconds(machine, dispatch)
        if not self.has_queue:
            self.now = max(self.now, free_since) + launching
            return self.now
        if len(self.queued) == machine.queue_tasks:
            self.now = max(self.now, self.queued.popleft())
        self.launched = max(self.launched, self.now, free_since) + launching
        self.queued.append(self.launched)
        return self.launched


@dataclass(eq=False)
class _Meeting:
    """Ranks that take part in one collective or message."""

    missing: int
    arrived: list[tuple[_Stream, RecordedAction, Price]] = field(default_factory=list)


class Replay:
    """One computation of ``recording`` on ``machine``.

    ``shares``: whether tasks slow each other down; without, the times are those of the simulator's live clock.
    ``has_queue``: whether a thread of its own launches tasks (TASK_QUEUE_ENABLE=1) or the host.
    """

    def __init__(self, recording: RecordedRun, machine: Machine, shares: bool = True, has_queue: bool = True) -> None:
        self._machine, self._shares = machine, shares
        self._hosts = {process: _Host(iter(actions), has_queue) for process, actions in recording.processes.items()}
        self._streams: dict[tuple[str, int, int], _Stream] = {}
        self._recorded = {(action.process, action.event) for action in recording.actions if action.records}
        self._events: dict[EventKey, int] = {}
        self._awaited: dict[EventKey, list[Callable[[int], None]]] = defaultdict(list)
        self._ends = _ends(recording)
        self._meetings: dict[Hashable, _Meeting] = {}
        self._over: set[Hashable] = set()
        self._behind: dict[Hashable, Callable[[int], None]] = {}
        """The start of a communicator's next call, by the key of the call whose end it waits for."""
        self._heap: list[tuple[int, int, Callable[[int], None]]] = []
        self._numbers = 0
        self._resources = Resources(self._schedule_end)
        self._spans: list[Span] = []

    def run(self) -> list[Span]:
        """All actions with their times, in the order in which they end.

        Raises ValueError where the run cannot go on: ranks that wait for each other, or a record that was cut short.
        """
        for host in self._hosts.values():
            self._advance(host)
        while self._heap:
            time, _, happens = heapq.heappop(self._heap)
            happens(time)
        stuck = [host.waits[0] for host in self._hosts.values() if host.waits is not None]
        stuck += [stream.held_back[1] for stream in self._streams.values() if stream.held_back is not None]
        if stuck:
            raise ValueError(
                f"the record ends before what its hosts wait for: {stuck[0].name} {stuck[0].told['detail']}"
            )
        return self._spans

    # ---- the host ----

    def _advance(self, host: _Host) -> None:
        """Let a host dispatch, up to a wait for an event whose time is not known yet, or for room on a stream."""
        for action in host.actions:
            if not action.of_host:
                stream = self._stream(action)
                if stream.holds == self._machine.stream_tasks:
                    stream.held_back = host, action
                    return
                self._launch(host, stream, action, 0)
            elif action.event is None:
                begun = host.now
                host.now = host.now + self._price(action).nanoseconds
                self._spans.append(Span(action, begun, host.now, begun))
            else:
                host.waits = action, host.now

                def goes_on(time: int, host: _Host = host) -> None:
                    self._goes_on(host, time)
                    self._advance(host)

                key = (action.process, action.event)
                if self._pending(key):
                    self._awaited[key].append(goes_on)
                    return
                self._goes_on(host, self._events.get(key, 0))

    def _goes_on(self, host: _Host, time: int) -> None:
        assert host.waits is not None
        action, begun = host.waits
        host.waits, host.now = None, max(host.now, time)
        self._spans.append(Span(action, begun, host.now, begun))

    def _stream(self, action: RecordedAction) -> _Stream:
        key = (action.process, action.device, action.stream)
        return self._streams.setdefault(key, _Stream(key[:2]))

    def _launch(self, host: _Host, stream: _Stream, action: RecordedAction, free_since: int) -> None:
        """Put a task on its stream, where there has been room since ``free_since``."""
        launched = 0 if action.dispatch == "none" else host.launch(self._machine, action.dispatch, free_since)
        stream.holds += 1
        stream.waiting.append((action, launched))
        self._next(stream)

    # ---- streams ----

    def _next(self, stream: _Stream) -> None:
        """Let a stream that is free begin its next task, when that is launched."""
        if stream.runs or not stream.waiting:
            return
        stream.runs = True
        _, launched = stream.waiting[0]
        self._at(max(stream.free, launched), lambda time: self._begin(stream, time))

    def _begin(self, stream: _Stream, time: int) -> None:
        action, _ = stream.waiting.popleft()
        stream.ready = stream.begun = time
        if action.kind in ("message", "collective") or "call" in action.told:
            self._meet(stream, action, time)
        elif action.kind is not None:
            self._run([(stream, action, self._price(action))], time, lambda end: self._end(stream, action, end))
        elif action.records:
            self._reach((action.process, action.event), time)
            self._end(stream, action, time)
        elif action.event is not None and self._pending((action.process, action.event)):
            self._awaited[action.process, action.event].append(lambda end: self._end(stream, action, end))
        else:
            self._end(stream, action, time)

    def _end(self, stream: _Stream, action: RecordedAction, time: int) -> None:
        begun = time if action.event is not None else stream.begun
        self._spans.append(Span(action, begun, time, stream.ready))
        stream.free, stream.runs = time, False
        stream.holds -= 1
        if stream.held_back is not None:
            host, awaited = stream.held_back
            stream.held_back = None
            self._launch(host, stream, awaited, time)
            self._advance(host)
        else:
            self._next(stream)

    def _pending(self, key: EventKey) -> bool:
        return key in self._recorded and key not in self._events

    def _reach(self, key: EventKey, time: int) -> None:
        self._events[key] = time
        for goes_on in self._awaited.pop(key, ()):
            self._at(time, goes_on)

    # ---- several ranks ----

    def _meet(self, stream: _Stream, action: RecordedAction, time: int) -> None:
        if action.kind != "message":
            self._arrive(_call(action), stream, action, self._price(action), time)
            return
        messages = messages_of(action)
        stream.left = len(messages)
        for message in messages:
            self._arrive(_way(action, message), stream, action, message_price(self._machine, action, message), time)

    def _arrive(self, key: Hashable, stream: _Stream, action: RecordedAction, alone: Price, time: int) -> None:
        meeting = self._meetings.setdefault(key, _Meeting(self._ends[key]))
        meeting.arrived.append((stream, action, alone))
        meeting.missing -= 1
        before = _call(action, -1)
        if not meeting.missing and (action.kind == "message" or before not in self._ends or before in self._over):
            self._hold(key, time)
        elif not meeting.missing:
            self._behind[before] = lambda end: self._hold(key, end)

    def _hold(self, key: Hashable, time: int) -> None:
        meeting = self._meetings.pop(key)
        for member, _, _ in meeting.arrived:
            member.begun = time

        def done(end: int) -> None:
            for member, its_action, _ in meeting.arrived:
                member.left = max(0, member.left - 1)
                if not member.left:
                    self._end(member, its_action, end)
            self._over.add(key)
            if key in self._behind:
                self._at(end, self._behind.pop(key))

        self._run(meeting.arrived, time, done)

    # ---- jobs ----

    def _price(self, action: RecordedAction) -> Price:
        return price(self._machine, action)

    def _run(
        self, members: list[tuple[_Stream, RecordedAction, Price]], time: int, done: Callable[[int], None]
    ) -> None:
        shares: dict[Hashable, float] = {
            (*stream.device, resource): share
            for stream, _, alone in members
            for resource, share in alone.shares.items()
            if self._shares
        }
        lasts = max(alone.nanoseconds for _, _, alone in members)
        self._numbers += 1
        self._resources.begin(FluidJob(self._numbers, lasts, shares, done), time)

    def _schedule_end(self, time: int, job: FluidJob, version: int) -> None:
        def ends(now: int) -> None:
            if job.version == version:
                self._resources.end(job, now)
                job.done(now)

        self._at(time, ends)

    def _at(self, time: int, happens: Callable[[int], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._heap, (time, self._numbers, happens))


def _group(action: RecordedAction) -> Hashable:
    """The communicator of a task. Communicators of other ranks may have the same name."""
    return action.told["communicator"], tuple(action.told["npus"])


def _call(action: RecordedAction, further: int = 0) -> Hashable:
    """The key of a task's call of its communicator, or of the call that is ``further`` calls on."""
    return _group(action), action.told.get("call", 0) + further


def _way(action: RecordedAction, message: Message) -> Hashable:
    """The key of a message, the same on both of its ends: communicator, sender, receiver and number."""
    own = action.told["rank"]
    ends = (own, message.peer) if message.sends else (message.peer, own)
    return _group(action), *ends, message.number


def _ends(recording: RecordedRun) -> Mapping[Hashable, int]:
    """How many recorded tasks take part in each collective and message."""
    found: dict[Hashable, int] = defaultdict(int)
    for action in recording.actions:
        if action.kind == "message":
            for message in messages_of(action):
                found[_way(action, message)] += 1
        elif "call" in action.told:
            found[_call(action)] += 1
    return found
