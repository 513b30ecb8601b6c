"""What travels between the ranks of a pipeline, and in which order: data, and the messages themselves.

All messages from one rank to another are sent in the order of the sender's row, and received in the same order: on NPUs
messages have no names. Messages to higher and to lower ranks have groups of their own, so that no rank waits for a
message behind one that waits for it. Of batches of a new shape, a header says before the first hidden states how large
they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_npu.comm.pending import Pending
from ds_npu.parallel.pipeline.schedule import Action, Kind, Messages

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Of hidden states; a header has the index."""
MOST_DIMS = 6


@dataclass(frozen=True)
class HiddenStates:
    """The hidden states of one micro-batch, as this rank knows them before they arrive; gradients are alike."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(values: torch.Tensor) -> HiddenStates:
        """Raises ValueError for hidden states that no header describes."""
        if values.dtype not in DTYPES or values.dim() > MOST_DIMS:
            raise ValueError(
                f"hidden states {list(values.shape)} of {values.dtype} leave a pipeline stage; accepted are at most "
                f"{MOST_DIMS} dims of {', '.join(map(str, DTYPES))}"
            )
        return HiddenStates(tuple(values.shape), values.dtype)

    def header(self, device: torch.device) -> torch.Tensor:
        """int64 [2 + MOST_DIMS]: index of the dtype, number of dims, sizes."""
        padding = [0] * (MOST_DIMS - len(self.shape))
        return torch.tensor([DTYPES.index(self.dtype), len(self.shape), *self.shape, *padding], device=device)

    @staticmethod
    def read(header: torch.Tensor) -> HiddenStates:
        """From what ``header`` made; waits for the device."""
        dtype, dims, *sizes = header.tolist()
        return HiddenStates(tuple(sizes[:dims]), DTYPES[dtype])


class PipelineLinks:
    """Sends and receives what crosses the borders of this rank's stages, in one run of a schedule after the other."""

    def __init__(self, groups: tuple[dist.ProcessGroup, dist.ProcessGroup], device: torch.device) -> None:
        """``groups`` of the ranks along pp: for messages to higher and to lower ones."""
        self._groups, self._device = groups, device
        self._own = dist.get_rank(groups[0])
        self._known: dict[tuple[Hashable, int], HiddenStates] = {}
        """By shape of a batch and stage, the hidden states that leave the stage, once they have."""
        self._sending: list[Pending[torch.Tensor]] = []

    def begin(self, messages: Messages, shapes: Sequence[Hashable]) -> None:
        """A run begins. ``shapes``: by micro-batch, what its hidden states' shapes depend on, equal on all ranks."""
        self._messages, self._shapes = messages, shapes
        self._posted: dict[Action, Pending[torch.Tensor]] = {}
        self._next = dict.fromkeys(messages.received, 0)

    def send(self, action: Action, values: torch.Tensor) -> None:
        """Send ``values``, the result of ``action``, if another rank needs it; nobody waits."""
        target = self._messages.sent.get(action)
        if target is None:
            return
        values = values.detach().contiguous()
        border = self._border(action)
        if border not in self._known:
            self._known[border] = HiddenStates.of(values)
            self._send(self._known[border].header(self._device), target)
        self._send(values, target)

    def receive(self, action: Action) -> torch.Tensor:
        """Wait for the result of ``action`` of another rank; behind it the next message from there may arrive."""
        source = next(rank for rank, each in self._messages.received.items() if action in each)
        queue = self._messages.received[source]
        while action not in self._posted:
            self._post(source)
        found = self._posted.pop(action).wait()
        # Of an unknown shape the host would have to wait for the header.
        if self._next[source] < len(queue) and self._border(queue[self._next[source]]) in self._known:
            self._post(source)
        return found

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for each in self._sending:
            each.wait()
        self._sending.clear()

    def _border(self, action: Action) -> tuple[Hashable, int]:
        """The shape of the batch, and the stage before the border that the result of ``action`` crosses."""
        return self._shapes[action.micro_batch], action.stage - (action.kind is not Kind.FORWARD)

    def _send(self, values: torch.Tensor, target: int) -> None:
        work = dist.isend(values, group=self._group(self._own, target), group_dst=target)
        self._sending.append(Pending(values, work))

    def _post(self, source: int) -> None:
        action = self._messages.received[source][self._next[source]]
        self._next[source] += 1
        border = self._border(action)
        if border not in self._known:
            header = torch.empty(2 + MOST_DIMS, dtype=torch.int64, device=self._device)
            dist.recv(header, group=self._group(source, self._own), group_src=source)
            self._known[border] = HiddenStates.read(header)
        hidden = self._known[border]
        values = torch.empty(hidden.shape, dtype=hidden.dtype, device=self._device)
        work = dist.irecv(values, group=self._group(source, self._own), group_src=source)
        self._posted[action] = Pending(values, work)

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        return self._groups[0 if source < target else 1]
