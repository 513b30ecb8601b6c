"""Messages between the ranks of a pipeline: their shapes and dtypes, and the process groups that carry them.

All messages from one rank to another are sent in the order of the sender's row, and received in the same order: on NPUs
messages have no tags. Messages to higher and to lower ranks use different groups, so that ranks do not deadlock. For
batches of a new shape, a header precedes the first hidden states with the number, shapes and dtypes of the tensors.

A rank that has failed sends zeros in place of its results, so that every message of the batch is sent and received.
Where their size is not known yet it sends a header that says so, and nothing after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_npu.comm.pending import Pending
from ds_npu.parallel.pipeline.schedule import Action, Kind

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.int32)
"""The dtypes that a message may have; a header contains the index."""
MOST_TENSORS, MOST_DIMS = 16, 6

Tensors = tuple[torch.Tensor, ...]
"""The tensors that cross a border in one micro-batch: hidden states first, then other inputs of later blocks."""


def differentiable(values: Tensors) -> Tensors:
    """The ``values`` whose gradients come back: those of floating point."""
    return tuple(each for each in values if each.is_floating_point())


@dataclass(frozen=True)
class MessageForm:
    """The shape and dtype of each tensor that crosses a border in one micro-batch, known before they arrive."""

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @staticmethod
    def of(values: Tensors) -> MessageForm:
        """Describe ``values``; raises ValueError for tensors that no header can describe."""
        wrong = [each for each in values if each.dtype not in DTYPES or each.dim() > MOST_DIMS]
        if wrong or len(values) > MOST_TENSORS:
            found = wrong[0] if wrong else values[MOST_TENSORS]
            raise ValueError(
                f"{len(values)} tensors leave a pipeline stage, among them {list(found.shape)} of {found.dtype}; "
                f"accepted are {MOST_TENSORS} of at most {MOST_DIMS} dims, of {', '.join(map(str, DTYPES))}"
            )
        return MessageForm(tuple((tuple(each.shape), each.dtype) for each in values))

    @property
    def gradients(self) -> MessageForm:
        """The form of the gradients that come back."""
        return MessageForm(tuple(each for each in self.tensors if each[1].is_floating_point))

    def header(self, device: torch.device) -> torch.Tensor:
        """int64 [1 + MOST_TENSORS * (2 + MOST_DIMS)]: number of tensors; for each its dtype's index, dims, sizes."""
        rows = [[DTYPES.index(dtype), len(shape), *shape] for shape, dtype in self.tensors]
        padded = [number for row in rows for number in (*row, *[0] * (2 + MOST_DIMS - len(row)))]
        return torch.tensor([len(rows), *padded, *[0] * (HEADER - 1 - len(padded))], device=device)

    @staticmethod
    def read(header: torch.Tensor) -> MessageForm | None:
        """Read a tensor that ``header`` made (None: the sender has failed); waits for the device."""
        count, *numbers = header.tolist()
        if count == FAILED:
            return None
        rows = [numbers[index * (2 + MOST_DIMS) :][: 2 + MOST_DIMS] for index in range(count)]
        return MessageForm(tuple((tuple(sizes[:dims]), DTYPES[dtype]) for dtype, dims, *sizes in rows))


HEADER = 1 + MOST_TENSORS * (2 + MOST_DIMS)
FAILED = -1
"""The number of tensors in a header of a rank that has failed."""


class PipelineLinks:
    """Sends and receives of the tensors that cross the borders of this rank's stages, for many runs of schedules."""

    def __init__(self, groups: tuple[dist.ProcessGroup, dist.ProcessGroup], device: torch.device) -> None:
        """``groups``: two groups of the ranks along pp, for messages to higher and to lower ranks."""
        self._groups, self.device = groups, device
        self._own = dist.get_rank(groups[0])
        self._known: dict[tuple[Hashable, int], MessageForm] = {}
        """The form of the tensors that have left a stage, by shape of the batch and stage."""

    def begin(
        self,
        received: Mapping[int, Sequence[Action]],
        shapes: Sequence[Hashable],
        acknowledged: Mapping[Action, int],
    ) -> None:
        """Begin a run. ``received``: by sending rank, the actions whose results this rank receives, in that order.

        ``shapes``: for each micro-batch a key of its tensors' shapes, equal on all ranks. ``acknowledged``: as in
        ``Schedule``.
        """
        self._received, self._shapes, self._acknowledged = received, shapes, acknowledged
        self._arrived = dict.fromkeys(received, 0)
        self._sending: dict[int, deque[list[Pending[torch.Tensor]]]] = {}
        """The messages that may not have arrived, by receiving rank and in their order; they keep their tensors."""
        self._posted: dict[Action, list[Pending[torch.Tensor]] | None] = {}
        self._next = dict.fromkeys(received, 0)

    def send(self, action: Action, target: int, values: Tensors) -> None:
        """Send ``values``, the result of ``action``, to the rank ``target``, without waiting.

        Raises ValueError for values that cannot be sent; then nothing has been sent.
        """
        values = tuple(each.detach().contiguous() for each in values)
        form = self._forward_form(action)
        found = MessageForm.of(values)
        expected = found if form is None else self._of(action, form)
        if found != expected:
            raise ValueError(
                f"{found} leaves a pipeline stage in {action}, and {expected} did for a micro-batch of the same "
                "shapes: what crosses a border must depend on shapes alone"
            )
        message = self._begin_message(target)
        if form is None:
            self._known[self._border(action)] = found
            message.append(self._send(found.header(self.device), target))
        message += [self._send(each, target) for each in values]

    def send_failed(self, action: Action, target: int) -> None:
        """Send zeros to ``target`` in place of the result of ``action``, which has failed or was left out."""
        form = self._forward_form(action)
        message = self._begin_message(target)
        if form is not None:
            for shape, dtype in self._of(action, form).tensors:
                message.append(self._send(torch.zeros(shape, dtype=dtype, device=self.device), target))
        elif action.kind is Kind.FORWARD:
            message.append(self._send(torch.full((HEADER,), FAILED, dtype=torch.int64, device=self.device), target))

    def receive(self, action: Action, source: int) -> Tensors | None:
        """Wait for the result of ``action`` from the rank ``source``, and post the receive of the next one.

        None where that rank has failed before the size of the result was known.
        """
        queue = self._received[source]
        while action not in self._posted:
            self._post(source)
        posted = self._posted.pop(action)
        found = None if posted is None else tuple(each.wait() for each in posted)
        # A step may have many micro-batches: without this, all that they send would be kept until its end.
        while self._arrived[source] < self._acknowledged[action]:
            self._arrived[source] += 1
            self._end_message(source)
        # For an unknown shape the host would have to wait for the header.
        if self._next[source] < len(queue) and self._forward_form(queue[self._next[source]]) is not None:
            self._post(source)
        return found

    def finish(self) -> None:
        """Wait until all sends have ended."""
        for target, messages in self._sending.items():
            while messages:
                self._end_message(target)

    def _border(self, action: Action) -> tuple[Hashable, int]:
        """The shape of the batch, and the stage before the border that the result of ``action`` crosses."""
        return self._shapes[action.micro_batch], action.stage - (action.kind is not Kind.FORWARD)

    def _begin_message(self, target: int) -> list[Pending[torch.Tensor]]:
        messages = self._sending.setdefault(target, deque())
        messages.append([])
        return messages[-1]

    def _end_message(self, target: int) -> None:
        for each in self._sending[target].popleft():
            each.wait()

    def _send(self, values: torch.Tensor, target: int) -> Pending[torch.Tensor]:
        work = dist.isend(values, group=self._groups[0 if self._own < target else 1], group_dst=target)
        return Pending(values, work)

    def _post(self, source: int) -> None:
        action = self._received[source][self._next[source]]
        self._next[source] += 1
        group = self._groups[0 if source < self._own else 1]
        form = self._forward_form(action)
        if form is None and action.kind is Kind.FORWARD:
            header = torch.empty(HEADER, dtype=torch.int64, device=self.device)
            dist.recv(header, group=group, group_src=source)
            form = MessageForm.read(header)
        if form is None:
            self._posted[action] = None
            return
        self._known[self._border(action)] = form
        posted = self._posted[action] = []
        for shape, dtype in self._of(action, form).tensors:
            values = torch.empty(shape, dtype=dtype, device=self.device)
            work = dist.irecv(values, group=group, group_src=source)
            posted.append(Pending(values, work))

    def _forward_form(self, action: Action) -> MessageForm | None:
        """The form of the states at the border that the result of ``action`` crosses; None before any crossed it."""
        return self._known.get(self._border(action))

    @staticmethod
    def _of(action: Action, form: MessageForm) -> MessageForm:
        """The form of the result of ``action``, where ``form`` is that of the states at the border."""
        return form if action.kind is Kind.FORWARD else form.gradients
