"""A pipeline schedule as data: for each rank, the list of its actions in the order in which it runs them.

An action is written as torch.distributed.pipelining writes it: ``2F0`` is the forward of stage 2 on micro-batch 0. Its
files of schedules (CSV, a row for each rank) can be read here.
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
"""Two cells in one, as torch.distributed.pipelining writes those that run together: ``(0F2;0B1)OVERLAP_F_B``."""


class Kind(Enum):
    """What an action computes of one stage and one micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of the stage's inputs and of its weights."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECOMPUTE = "R"
    """The forward again, of which only the inputs were kept."""


class Action(NamedTuple):
    """One cell of a schedule."""

    stage: int
    """Of the model's stages, from its first layers to its last."""
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


Rows = Sequence[Sequence[Action]]


RESULTS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)
"""Kinds of actions whose results another stage takes."""


@dataclass(frozen=True)
class Messages:
    """The messages of one rank along pp."""

    sent: Mapping[Action, int]
    """By the action whose result is sent, the rank that it goes to."""
    received: Mapping[int, tuple[Action, ...]]
    """By rank, the actions whose results it sends, in the order of its row."""


class ScheduleError(ValueError):
    """A schedule that cannot run; the text names the cell at fault."""


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank along pp."""

    rows: tuple[tuple[Action, ...], ...]
    paired: frozenset[Action] = frozenset()
    """Forwards that run together with the cell behind them, a backward of another micro-batch."""

    @staticmethod
    def of(rows: Rows, paired: Iterable[Action] = ()) -> Schedule:
        return Schedule(tuple(tuple(row) for row in rows), frozenset(paired))

    def steps(self, rank: int) -> Iterator[tuple[Action, ...]]:
        """What ``rank`` runs, one after the other: an action, or two together."""
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

    @cached_property
    def messages(self) -> tuple[Messages, ...]:
        """By rank: hidden states go from a forward to the rank of the next stage, gradients to that before."""
        sent: list[dict[Action, int]] = [{} for _ in self.rows]
        received: list[dict[int, list[Action]]] = [{} for _ in self.rows]
        for source, row in enumerate(self.rows):
            for action in row:
                stage = action.stage + (1 if action.kind is Kind.FORWARD else -1)
                if action.kind in RESULTS and 0 <= stage < self.stages and (to := self.rank_of[stage]) != source:
                    sent[source][action] = to
                    received[to].setdefault(source, []).append(action)
        tuples = ({source: tuple(each) for source, each in found.items()} for found in received)
        return tuple(Messages(*each) for each in zip(sent, tuples, strict=True))

    def needs(self, action: Action) -> Iterator[Action]:
        """The actions that have to be done before ``action``; those on other ranks send it what it computes with."""
        stage, kind, micro_batch = action
        if kind is Kind.FORWARD:
            if stage > 0:
                yield Action(stage - 1, Kind.FORWARD, micro_batch)
        elif kind is Kind.BACKWARD_WEIGHT:
            yield Action(stage, Kind.BACKWARD_INPUT, micro_batch)
        elif kind is Kind.RECOMPUTE:
            yield Action(stage, Kind.FORWARD, micro_batch)
        else:
            again = Action(stage, Kind.RECOMPUTE, micro_batch)
            yield again if again in self.cells else Action(stage, Kind.FORWARD, micro_batch)
            if stage < self.stages - 1:
                whole = Action(stage + 1, Kind.BACKWARD, micro_batch)
                yield whole if whole in self.cells else Action(stage + 1, Kind.BACKWARD_INPUT, micro_batch)

    def live_activations(self, rank: int) -> Iterator[int]:
        """After the start of each action of ``rank``: of how many (stage, micro-batch) it keeps activations.

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
        """By rank, the most that ``live_activations`` says."""
        return tuple(max(self.live_activations(rank), default=0) for rank in range(len(self.rows)))


def from_csv(text: str) -> Schedule:
    """Read a row of cells for each rank; empty cells are left out. Raises ScheduleError for a cell that is no action.

    ``check_schedule`` says whether it can run.
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
            # The forward first, wherever it is written.
            actions.sort(key=lambda each: each.kind is not Kind.FORWARD)
            rows[-1] += actions
            paired += actions[:1] if two else []
    return Schedule.of(rows, paired)


def to_csv(schedule: Schedule) -> str:
    """The text that ``from_csv`` reads."""
    out = io.StringIO()
    rows = [[_cell(step) for step in schedule.steps(rank)] for rank in range(len(schedule.rows))]
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _cell(step: tuple[Action, ...]) -> str:
    return str(step[0]) if len(step) == 1 else f"({step[0]};{step[1]})OVERLAP_F_B"
