"""What travels between the ranks of a pipeline, and in which order: data, and the messages themselves.

All messages from one rank to another are sent in the order of the sender's row, and received in the same order: on NPUs
messages have no names. Messages to higher and to lower ranks have groups of their own, so that no rank waits for a
message behind one that waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_npu.comm.pending import Pending
from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule

GRADIENTS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True)
class HiddenStates:
    """The hidden states of one micro-batch, as this rank knows them before they arrive; gradients are alike."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Messages:
    """The messages of one rank along pp."""

    sent: Mapping[Action, int]
    """By the action whose result is sent, the rank that it goes to."""
    received: Mapping[int, tuple[Action, ...]]
    """By rank, the actions whose results it sends, in the order of its row."""


def messages_of(schedule: Schedule, rank: int) -> Messages:
    """Hidden states go from a forward to the rank of the next stage, gradients to that of the stage before."""
    target: dict[Action, int] = {}
    for action in schedule.actions():
        stage = action.stage + (1 if action.kind is Kind.FORWARD else -1)
        travels = action.kind is Kind.FORWARD or action.kind in GRADIENTS
        if travels and 0 <= stage < schedule.stages and schedule.rank_of[stage] != schedule.rank_of[action.stage]:
            target[action] = schedule.rank_of[stage]
    received: dict[int, list[Action]] = {}
    for action in schedule.actions():
        if target.get(action) == rank:
            received.setdefault(schedule.rank_of[action.stage], []).append(action)
    own = {action: to for action, to in target.items() if schedule.rank_of[action.stage] == rank}
    return Messages(own, {source: tuple(each) for source, each in received.items()})


class PipelineLinks:
    """Sends and receives the ``messages`` of this rank in one run of a schedule."""

    def __init__(
        self,
        messages: Messages,
        hidden: Sequence[HiddenStates],
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    ) -> None:
        """``hidden``: by micro-batch; ``groups`` of the ranks along pp: for messages to higher and to lower ones."""
        self._messages, self._hidden, self._groups = messages, hidden, groups
        self._own = dist.get_rank(groups[0])
        self._posted: dict[Action, Pending[torch.Tensor]] = {}
        self._next = dict.fromkeys(messages.received, 0)
        self._sending: list[Pending[torch.Tensor]] = []

    def send(self, action: Action, values: torch.Tensor) -> None:
        """Send ``values``, the result of ``action``, if another rank needs it; nobody waits."""
        target = self._messages.sent.get(action)
        if target is not None:
            values = values.detach().contiguous()
            work = dist.isend(values, group=self._group(self._own, target), group_dst=target)
            self._sending.append(Pending(values, work))

    def receive(self, action: Action) -> torch.Tensor:
        """Wait for the result of ``action`` of another rank; behind it the next message from there may arrive."""
        source = next(rank for rank, each in self._messages.received.items() if action in each)
        queue = self._messages.received[source]
        while action not in self._posted:
            self._post(source)
        found = self._posted.pop(action).wait()
        if self._next[source] < len(queue):
            self._post(source)
        return found

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for each in self._sending:
            each.wait()
        self._sending.clear()

    def _post(self, source: int) -> None:
        action = self._messages.received[source][self._next[source]]
        self._next[source] += 1
        values = self._hidden[action.micro_batch].empty()
        work = dist.irecv(values, group=self._group(source, self._own), group_src=source)
        self._posted[action] = Pending(values, work)

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        return self._groups[0 if source < target else 1]
