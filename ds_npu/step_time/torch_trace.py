"""Reads the trace of torch.profiler on a CPU: which operator runs on each thread, and which messages are in flight.

The trace does not name the communicator of gloo's calls: in the window ds_npu marks each call of torch.distributed
(``MARK``) with the name of its process group, but for those in a backward, where no mode of torch is on. Each of gloo's
threads works for one group, which the marked calls tell.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ds_npu.step_time.trace import (
    ATTENTION,
    PRODUCTS,
    CommunicatorCall,
    Header,
    Operation,
    OperatorTensors,
    RankTrace,
    TraceError,
    kind_of,
)

MARK = "ds_npu communicates "
"""The begin of a mark's name; the name of the call and that of the process group follow, with a space between."""
STEP = re.compile(r"ProfilerStep#\d+")
GLOO = "gloo:"
OPERATOR = re.compile(r"(?!autograd::|torch::|c10d::|profiler::)\w+::\w+")
"""Names of operators, in contrast to nodes of autograd, calls of torch.distributed and ranges of a script."""
WITHOUT_WORK = re.compile(
    r"aten::(_unsafe_view|view|view_as|reshape|as_strided|t|transpose|permute|expand|expand_as|select|slice|narrow|split|"
    r"unbind|chunk|unsqueeze|squeeze|detach|alias|unflatten|flatten|empty|empty_like|empty_strided|resize_|set_|to|"
    r"resolve_conj|resolve_neg|result_type|is_nonzero|item|_local_scalar_dense|lift_fresh|linear|matmul|einsum)"
)
"""Operators that only describe a tensor anew, or call others: their own time is the host's."""
ITEMSIZES = {"double": 8, "float": 4, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4, "bool": 1}
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier", "scatter", "gather")
SLACK = 500_000
"""Nanoseconds behind a mark in which a thread of gloo may begin the call that was put on it."""
NANOSECONDS = 1000
"""In a microsecond, the unit of the trace."""


class _Event(NamedTuple):
    begun: int
    ended: int
    name: str
    arguments: Mapping[str, Any]

    def __lt__(self, other: tuple[Any, ...]) -> bool:
        return self[:3] < other[:3]


def read_torch_trace(path: Path, header: Header) -> RankTrace:
    """The trace in the file ``path``; raises TraceError where it is none, or holds no step."""
    try:
        content = json.loads(path.read_bytes())
        base = int(content.get("baseTimeNanoseconds", 0))
        threads = _threads(content["traceEvents"], base)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}: no trace of torch.profiler can be read there ({error!r})") from error
    steps = sorted(event for events in threads.values() for event in events if STEP.fullmatch(event.name))
    # The profiler begins one more step behind the last one of the window.
    steps = steps[: header.count]
    if not steps:
        raise TraceError(f"{path}: the trace has no step: nothing ran while it was recorded")
    begun, ended = steps[0].begun, steps[-1].ended
    operations = [each for events in threads.values() for each in _operations(events)]
    messages = _messages(threads, header)
    return RankTrace(header, begun, ended, tuple(operations), tuple(messages))


def _threads(entries: Iterable[Mapping[str, Any]], base: int) -> dict[Any, list[_Event]]:
    """The events of each thread; one that holds another comes first."""
    found: dict[Any, list[_Event]] = defaultdict(list)
    for entry in entries:
        if entry.get("ph") == "X" and entry.get("cat") in ("cpu_op", "user_annotation"):
            begun = base + round(entry["ts"] * NANOSECONDS)
            arguments = entry.get("args", {})
            found[entry["tid"]].append(
                _Event(begun, begun + round(entry["dur"] * NANOSECONDS), entry["name"], arguments)
            )
    for events in found.values():
        events.sort(key=lambda event: (event.begun, -event.ended))
    return found


class _Running:
    """An event that runs on its thread, and the operation that its time belongs to."""

    def __init__(self, event: _Event, outer: _Running | None) -> None:
        self.ended: int = event.ended if outer is None else min(event.ended, outer.ended)
        self.event, self.kind = event, ""
        self.pieces: list[tuple[int, int]] = []
        self.owner: _Running | None = None
        self.is_message: bool = event.name.startswith(GLOO) or (outer is not None and outer.is_message)
        if self.is_message:
            return
        if outer is not None and outer.owner is not None and outer.owner.kind in (ATTENTION, PRODUCTS):
            # An attention or a product is one operation, whatever it calls.
            self.owner = outer.owner
        elif _computes(event.name):
            self.kind = kind_of(event.name)
            self.owner = self


@cache
def _computes(name: str) -> bool:
    """Whether an event of this name is an operator with work of its own."""
    return OPERATOR.fullmatch(name) is not None and WITHOUT_WORK.fullmatch(name) is None


def _operations(events: Iterable[_Event]) -> Iterator[Operation]:
    """The operations of one thread, each with the times in which it runs itself, and no operation that it calls."""
    stack: list[_Running] = []
    now = 0
    found: list[_Running] = []

    def pass_to(time: int) -> None:
        nonlocal now
        while stack:
            top = stack[-1]
            until = min(time, top.ended)
            if top.owner is not None and until > now:
                top.owner.pieces.append((now, until))
            now = max(now, until)
            if top.ended > time:
                break
            stack.pop()
        now = time

    for event in events:
        pass_to(event.begun)
        running = _Running(event, stack[-1] if stack else None)
        stack.append(running)
        if running.owner is running:
            found.append(running)
    if stack:
        pass_to(max(each.ended for each in stack))
    for each in found:
        yield Operation(each.event.name, each.kind, _joined(each.pieces), _work(each.event.arguments))


def _joined(pieces: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for begun, ended in pieces:
        if found and found[-1][1] == begun:
            found[-1] = (found[-1][0], ended)
        else:
            found.append((begun, ended))
    return tuple(found)


def _work(arguments: Mapping[str, Any]) -> OperatorTensors | None:
    """Shapes and types of an operator's tensors; None where they were not recorded."""
    if "Input Dims" not in arguments:
        return None
    shapes, itemsizes = [], []
    for dims, kind in zip(arguments["Input Dims"], arguments["Input type"], strict=False):
        several = bool(dims) and isinstance(dims[0], list)
        if kind in ITEMSIZES or kind == "TensorList":
            for shape in dims if several else [dims]:
                shapes.append(tuple(shape))
                itemsizes.append(ITEMSIZES.get(kind, 4))
    return OperatorTensors(tuple(shapes), tuple(itemsizes), 0, "True" in arguments.get("Concrete Inputs", ()))


def _messages(threads: Mapping[Any, list[_Event]], header: Header) -> Iterator[CommunicatorCall]:
    """Gloo's calls with the ranks of their communicators.

    A receive is on the thread that called it, so the mark around it names its group; any other call has the group of
    its thread. Sends are left out: gloo says that they last until somebody waits for them.
    """
    marks = sorted(event for events in threads.values() for event in events if event.name.startswith(MARK))
    calls = [(event, thread) for thread, own in threads.items() for event in own if event.name.startswith(GLOO)]
    groups = _groups_of_threads(marks, calls)
    for call, thread in calls:
        name = _family(call.name.removeprefix(GLOO))
        around = _around(marks, call.begun) if name == "recv" else None
        group = groups.get(thread, "") if around is None else _told(around)[1]
        if name != "send":
            yield CommunicatorCall(name, tuple(header.communicators.get(group, ())), call.begun, call.ended)


def _told(mark: _Event) -> tuple[str, str]:
    """The name of the call and of the process group in a mark."""
    name, _, group = mark.name.removeprefix(MARK).partition(" ")
    return _family(name), group


def _groups_of_threads(marks: list[_Event], calls: Iterable[tuple[_Event, Any]]) -> dict[Any, str]:
    """The process group that each of gloo's threads works for: most marks in which it begins a call name it."""
    votes: dict[Any, Counter[str]] = defaultdict(Counter)
    for call, thread in calls:
        mark = _around(marks, call.begun)
        if mark is not None:
            name, group = _told(mark)
            if name == _family(call.name.removeprefix(GLOO)):
                votes[thread][group] += 1
    return {thread: found.most_common(1)[0][0] for thread, found in votes.items()}


def _around(marks: list[_Event], time: int) -> _Event | None:
    """The last of ``marks`` that began by ``time``.

    None where it ended more than SLACK before that.
    """
    index = bisect_right(marks, time, key=lambda mark: mark.begun) - 1
    return marks[index] if index >= 0 and time <= marks[index].ended + SLACK else None


def _family(name: str) -> str:
    """The word for a call that torch.distributed and gloo agree on: ``all_reduce`` for ``all_reduce_coalesced``."""
    plain = name.replace("_", "")
    for family in COLLECTIVES:
        if family.replace("_", "") in plain:
            return family
    return {"isend": "send", "irecv": "recv", "recvAnySource": "recv"}.get(name, name)
