"""A pipeline schedule as data: for each rank, the list of its actions in the order in which it runs them.

An action is written as torch.distributed.pipelining writes it: ``2F0`` is the forward of stage 2 on micro-batch 0.
``from_csv`` reads torch's files of schedules (CSV, a row for each rank).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

CELL = re.compile(r"(\d+)([FBIWR])(\d+)")
PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")
"""Two overlapping actions in one cell, as torch.distributed.pipelining writes them: ``(0F2;0B1)OVERLAP_F_B``."""


class Kind(Enum):
    """The kind of an action: a computation of one stage on one micro-batch, or a send or receive."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of the stage's inputs and of its weights."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECOMPUTE = "R"
    """The forward run again, after one that kept only its inputs."""
    SEND_STATES = "SEND_F"
    RECEIVE_STATES = "RECV_F"
    SEND_GRADIENTS = "SEND_B"
    RECEIVE_GRADIENTS = "RECV_B"
    # Enum's own hash is a Python function, and too slow for every look-up of an action.
    __hash__ = object.__hash__


class Action(NamedTuple):
    """One cell of a schedule."""

    stage: int
    """The stage's number, counted from the model's first layers."""
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


Rows = Sequence[Sequence[Action]]
BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
SENDS, RECEIVES = (Kind.SEND_STATES, Kind.SEND_GRADIENTS), (Kind.RECEIVE_STATES, Kind.RECEIVE_GRADIENTS)


class ScheduleError(ValueError):
    """A schedule that cannot run; the text names the cell at fault."""


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank along pp."""

    rows: tuple[tuple[Action, ...], ...]
    paired: frozenset[Action] = frozenset()
    """Forwards that overlap with the next action of their row, a backward of another micro-batch."""

    @staticmethod
    def of(rows: Rows, paired: Iterable[Action] = ()) -> Schedule:
        return Schedule(tuple(tuple(row) for row in rows), frozenset(paired))

    def steps(self, rank: int) -> Iterator[tuple[Action, ...]]:
        """The steps of ``rank``, one after the other: an action, or two that overlap."""
        row = self.rows[rank]
        for index, action in enumerate(row):
            if index == 0 or row[index - 1] not in self.paired:
                yield row[index : index + 2] if action in self.paired else (action,)

    @cached_property
    def stages(self) -> int:
        return 1 + max((action.stage for action in self.actions()), default=-1)

    @cached_property
    def micro_batches(self) -> int:
        return 1 + max((action.micro_batch for action in self.actions()), default=-1)

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage."""
        return {action.stage: rank for rank, row in enumerate(self.rows) for action in row}

    @cached_property
    def cells(self) -> dict[Action, tuple[int, int]]:
        """(rank, index in its row) of each action."""
        return {action: (rank, index) for rank, row in enumerate(self.rows) for index, action in enumerate(row)}

    def actions(self) -> Iterator[Action]:
        for row in self.rows:
            yield from row

    def needs(self, action: Action) -> Iterator[Action]:
        """The actions that must end before ``action``; those on other ranks send it their results."""
        stage, kind, micro_batch = action
        if kind is Kind.BACKWARD_WEIGHT:
            yield Action(stage, Kind.BACKWARD_INPUT, micro_batch)
        elif kind is not Kind.FORWARD:
            again = Action(stage, Kind.RECOMPUTE, micro_batch)
            yield again if kind in BACKWARDS and again in self.cells else Action(stage, Kind.FORWARD, micro_batch)
        source = self.source(action)
        if source is not None:
            yield source

    def source(self, action: Action) -> Action | None:
        """The action of another stage whose result ``action`` computes with."""
        stage, kind, micro_batch = action
        if kind is Kind.FORWARD and stage > 0:
            return Action(stage - 1, Kind.FORWARD, micro_batch)
        if kind not in BACKWARDS or stage == self.stages - 1:
            return None
        whole = Action(stage + 1, Kind.BACKWARD, micro_batch)
        return whole if whole in self.cells else whole._replace(kind=Kind.BACKWARD_INPUT)

    @cached_property
    def transfers(self) -> dict[Action, tuple[Action, Action]]:
        """The send and the receive of each action whose result another rank uses."""
        found = {}
        for action, (rank, _) in self.cells.items():
            goes_back = action.kind in BACKWARDS
            stage = action.stage + (-1 if goes_back else 1)
            if (goes_back or action.kind is Kind.FORWARD) and self.rank_of.get(stage, rank) != rank:
                send = action._replace(kind=SENDS[goes_back])
                receive = action._replace(kind=RECEIVES[goes_back])
                found[action] = send, receive._replace(stage=stage)
        return found

    @cached_property
    def carried(self) -> dict[Action, Action]:
        """The action whose result each send or receive carries."""
        return {transfer: action for action, both in self.transfers.items() for transfer in both}

    @cached_property
    def with_transfers(self) -> Schedule:
        """This schedule with every send and receive, in the order in which ranks run them.

        A rank receives the inputs of a step directly before it, and sends its results directly after it.
        """
        rows: list[list[Action]] = [[] for _ in self.rows]
        for rank, row in enumerate(rows):
            for step in self.steps(rank):
                row += [self.transfers[each][1] for each in map(self.source, step) if each and each in self.transfers]
                row += [*step, *(self.transfers[each][0] for each in step if each in self.transfers)]
        return Schedule.of(rows, self.paired)

    @cached_property
    def messages(self) -> tuple[Mapping[int, Sequence[Action]], ...]:
        """For each receiving rank: by sending rank, the actions whose results it sends, in that order."""
        received: list[dict[int, list[Action]]] = [{} for _ in self.rows]
        for action, (_, receive) in self.transfers.items():
            received[self.rank_of[receive.stage]].setdefault(self.rank_of[action.stage], []).append(action)
        return tuple(received)

    @cached_property
    def acknowledged(self) -> dict[Action, int]:
        """For each action whose result is sent: how many messages the sender has received from the receiver by then.

        A receiver that has the result knows that this many of its own messages, the first ones, have arrived.
        """
        found = {}
        for row in self.with_transfers.rows:
            received: dict[int, int] = {}
            for action in filter(self.carried.get, row):
                send, receive = self.transfers[self.carried[action]]
                if action == send:
                    found[self.carried[action]] = received.get(self.rank_of[receive.stage], 0)
                else:
                    source = self.rank_of[send.stage]
                    received[source] = received.get(source, 0) + 1
        return found

    def live_activations(self, rank: int) -> Iterator[int]:
        """Count, after the start of each action of ``rank``, the (stage, micro-batch) whose activations it keeps.

        They are kept from the forward (or the recomputation) to the end of the backward, or of its weight part.
        """
        live, row = 0, self.rows[rank]
        recomputed = {action[::2] for action in row if action.kind is Kind.RECOMPUTE}
        for action in row:
            begins = Kind.RECOMPUTE if action[::2] in recomputed else Kind.FORWARD
            live += action.kind is begins
            yield live
            live -= action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """The largest number of ``live_activations`` of each rank."""
        return tuple(max(self.live_activations(rank), default=0) for rank in range(len(self.rows)))


def from_csv(text: str) -> Schedule:
    """Read a row of cells for each rank, skipping empty ones. Raises ScheduleError for a cell that is no action.

    ``check_schedule`` checks that the schedule can run.
    """
    rows: list[list[Action]] = []
    paired: list[Action] = []
    for rank, row in enumerate(csv.reader(io.StringIO(text))):
        rows.append([])
        for index, cell in enumerate(map(str.strip, row)):
            two = PAIR.fullmatch(cell)
            found = [CELL.fullmatch(each.strip()) for each in (two.groups() if two else (cell,))]
            if cell and None in found:
                raise ScheduleError(
                    f"row {rank}, cell {index}: found {cell!r}; an action is a stage, one of F, B, I, W, R and a "
                    "micro-batch, as 2F0; two that run together are written (2F1;2B0)OVERLAP_F_B"
                )
            actions = [Action(int(each[1]), Kind(each[2]), int(each[3])) for each in found if each is not None]
            # The file may have the backward first.
            actions.sort(key=lambda each: each.kind is not Kind.FORWARD)
            rows[-1] += actions
            paired += actions[:1] if two else []
    return Schedule.of(rows, paired)


def to_csv(schedule: Schedule) -> str:
    """The text that ``from_csv`` reads; torch also reads that of ``with_transfers``, with sends and receives."""
    out = io.StringIO()
    for rank in range(len(schedule.rows)):
        steps = (";".join(map(str, step)) for step in schedule.steps(rank))
        csv.writer(out, lineterminator="\n").writerow(f"({step})OVERLAP_F_B" if ";" in step else step for step in steps)
    return out.getvalue()
