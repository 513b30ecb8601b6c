"""Gradients of ZeRO 3 that are copied at most once before they are sent.

DeepSpeed (0.19.8 runtime/zero/stage3.py) copies gradients into a bucket of ``reduce_bucket_size``, copies them again
so that the parts of each rank are one after the other, and divides them: six times their bytes pass the memory. Here
gradients wait until they are enough for a message, for which they are copied once, and sums are divided. One that is
enough by itself is sent from where it was computed: its parts are in order there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn

from ds_npu.comm.collectives import scatter_parts
from ds_npu.comm.pending import Pending
from ds_npu.config.zero_buckets import why_not_scattered
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.bucketed_gradients import ended_early, is_exact_behind_a_sum
from ds_npu.zero_ext.gather_plan import message_elements
from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method
from ds_npu.zero_ext.stage_3_corrections import PARTITIONS

IN_FLIGHT = 2
"""Messages that are in flight, or whose gradients are kept, at one time."""
Reduce = Callable[[nn.Parameter], None]


class _ScatteredWeight(NamedTuple):
    """A weight whose gradients are scattered."""

    ranks: dist.ProcessGroup
    size: int
    """The number of ``ranks``."""
    number: int
    """DeepSpeed's number of the weight."""
    dtype: torch.dtype
    """The dtype of messages."""


@dataclass
class _Waiting:
    """Gradients that have not been sent, of weights over the same ranks."""

    ranks: dist.ProcessGroup
    gradients: list[torch.Tensor] = field(default_factory=list)
    partitions: list[torch.Tensor] = field(default_factory=list)
    """This rank's memory for the sum of its part of each gradient."""
    elements: int = 0
    """Elements of all these gradients."""


@dataclass(frozen=True)
class _Message:
    """A sum in flight."""

    pending: Pending[torch.Tensor]
    partitions: Sequence[torch.Tensor]
    is_direct: bool
    """Whether the sum is written to the partition."""
    read: Sequence[torch.Tensor]
    """Gradients that the message itself reads."""


class ScatteredGradients:
    """The gradients of one DeepSpeedZeroOptimizer_Stage3 that its ranks divide evenly."""

    def __init__(self, optimizer: Any, data_ranks: int, elements: int) -> None:
        """``data_ranks``: the number by which sums are divided (``average_over_data_ranks``).

        ``elements``: the most in a message, except for a single gradient that is larger.
        """
        self._optimizer = optimizer
        self._divisor = data_ranks
        self._elements = elements
        self._stream: Any = optimizer.reduce_and_partition_stream
        weights = [each for group in optimizer.fp16_groups for each in group if each.requires_grad]
        found = ((id(weight), _scattered(optimizer, weight, data_ranks)) for weight in weights)
        self._weights = {number: each for number, each in found if each is not None}
        """The weights whose gradients are scattered, by id."""
        self._others = sum(weight.ds_numel for weight in weights if id(weight) not in self._weights)
        self._come: set[int] = set()
        """The ids of weights whose gradients have come since the last forward."""
        self._waiting: dict[tuple[dist.ProcessGroup, torch.dtype], _Waiting] = {}
        self._sent: deque[_Message] = deque()
        self._kept: deque[tuple[Any, Sequence[torch.Tensor]]] = deque()
        """Gradients that copies and messages read, with the event after that."""

    def install(self) -> None:
        """Send gradients from now on, if there are any to send.

        DeepSpeed's buckets shrink to what the other gradients need.
        """
        if not self._weights:
            return
        optimizer = self._optimizer
        level = MethodLevel.SCATTERED
        wrap_method(optimizer, "reduce_independent_p_g_buckets_and_remove_grads", self._reduce, level)
        wrap_method(optimizer, "clear_backward_seen_flag", self._begin_forward, level)
        wrap_method(optimizer, "independent_gradient_partition_epilogue", self._end_backward, level)
        optimizer.reduce_bucket_size = min(optimizer.reduce_bucket_size, max(self._others, 1))
        for bucket in optimizer.ipg_buckets.values():
            if bucket.buffer is not None:
                bucket.buffer = bucket.buffer.new_empty(optimizer.reduce_bucket_size)

    def forget(self) -> None:
        """Drop gradients that are kept for messages, all of which the current stream waits for."""
        self._kept.clear()

    def _begin_forward(self, clear: Callable[[], None]) -> None:
        if self._sent or sum([each.elements for each in self._waiting.values()]):
            raise ended_early("leaves all of it to DeepSpeed")
        self._come.clear()
        clear()

    def _end_backward(self, end: Callable[[], None]) -> None:
        for waiting in self._waiting.values():
            if waiting.gradients:
                self._send(waiting)
        self._finish(0)
        end()

    def _reduce(self, reduce: Reduce, weight: nn.Parameter) -> None:
        gradient = weight.grad
        scattered = self._weights.get(id(weight))
        number = id(weight)
        if not getattr(weight, "ds_grad_is_ready", True):
            reduce(weight)
            return
        if number in self._come:
            # DeepSpeed would write it over the gradient that came before.
            raise RuntimeError(_came_again(self._optimizer, weight))
        self._come.add(number)
        if scattered is None or gradient is None or gradient.dtype != scattered.dtype or not gradient.is_contiguous():
            reduce(weight)
            return
        weight.grad = None
        self._take(gradient, scattered)

    def _take(self, gradient: torch.Tensor, weight: _ScatteredWeight) -> None:
        """Let ``gradient`` wait to be sent.

        If too many would wait with it, those that wait are sent before.
        """
        key = weight.ranks, weight.dtype
        if key not in self._waiting:
            self._waiting[key] = _Waiting(weight.ranks)
        waiting = self._waiting[key]
        if waiting.gradients and waiting.elements + gradient.numel() > self._elements:
            self._send(waiting)
        partition = getattr(self._optimizer, PARTITIONS)[weight.number]
        waiting.gradients.append(gradient)
        waiting.partitions.append(partition[: gradient.numel() // weight.size])
        waiting.elements += gradient.numel()

    @torch.no_grad()
    def _send(self, waiting: _Waiting) -> None:
        size = dist.get_world_size(waiting.ranks)
        gradients = waiting.gradients
        partitions = waiting.partitions
        waiting.gradients = []
        waiting.partitions = []
        waiting.elements = 0
        if self._stream is not None:
            self._stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(self._stream):
            parts = [each.view(size, -1) for each in gradients]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            is_first = self._optimizer.micro_step_id == 0
            partition = partitions[0]
            is_direct = is_first and len(parts) == 1 and partition.dtype == whole.dtype
            out = partition if is_direct else torch.empty_like(whole[0])
            read = gradients if len(parts) == 1 else []
            self._sent.append(_Message(scatter_parts(out, whole, waiting.ranks), partitions, is_direct, read))
        if len(parts) > 1:
            self._keep(gradients)
        self._finish(IN_FLIGHT - 1)

    @torch.no_grad()
    def _finish(self, most: int) -> None:
        """Add the sums that have been sent to the partitions, but for the ``most`` last messages."""
        while len(self._sent) > most:
            message = self._sent.popleft()
            with get_accelerator().stream(self._stream):
                found = message.pending.wait()
                if message.is_direct:
                    found.div_(self._divisor)
                else:
                    self._add(message.partitions, found)
            self._keep(message.read)

    def _add(self, partitions: Sequence[torch.Tensor], found: torch.Tensor) -> None:
        sums = torch.split(found, [each.numel() for each in partitions])
        for partition, each in zip(partitions, sums, strict=True):
            if self._optimizer.micro_step_id == 0:
                partition.copy_(each).div_(self._divisor)
            else:
                partition.add_(each, alpha=1 / self._divisor)

    def _keep(self, gradients: Sequence[torch.Tensor]) -> None:
        """Keep ``gradients`` until the computing stream has waited for what reads them, and may reuse their memory.

        The allocator would ask the host when that has ended, and take other memory while the host runs ahead.
        """
        if self._stream is None or not gradients:
            return
        event = get_accelerator().Event()
        event.record(self._stream)
        self._kept.append((event, gradients))
        if len(self._kept) > IN_FLIGHT:
            get_accelerator().current_stream().wait_event(self._kept.popleft()[0])


def scatter_gradients(engine: Any, optimizer: Any, topology: Topology) -> Callable[[], None]:
    """Send gradients of ``optimizer``, ZeRO 3's, with one copy or none, unless its config has a key against it.

    Returns a function to be called where the current stream has waited for all messages.
    """
    if type(optimizer) is not DeepSpeedZeroOptimizer_Stage3 or why_not_scattered(engine._config._param_dict):
        return lambda: None
    elements = message_elements(sum(weight.ds_numel for weight in engine.module.parameters()))
    size = min(elements, optimizer.reduce_bucket_size)
    scattered = ScatteredGradients(optimizer, topology.size("dp"), size)
    scattered.install()
    return scattered.forget


def _scattered(optimizer: Any, weight: Any, divisor: float) -> _ScatteredWeight | None:
    """How to send gradients of ``weight``.

    None where the ranks do not divide them evenly, or the sums not exactly.
    """
    ranks = optimizer._get_param_partition_group(weight)
    dtype = optimizer.get_param_comm_dtype(weight)
    size = dist.get_world_size(ranks)
    is_even = size > 1 and weight.ds_numel % size == 0
    return (
        _ScatteredWeight(ranks, size, weight.ds_id, dtype)
        if is_even and is_exact_behind_a_sum(divisor, dtype)
        else None
    )


def _came_again(optimizer: Any, weight: nn.Parameter) -> str:
    name = optimizer.param_names.get(weight, "a weight")
    return (
        f"{name}: its gradient came twice since the last forward, and ZeRO 3 would write the second over the first "
        "(two backwards behind two forwards, or a weight that two recomputations with use_reentrant share). What to "
        "do: run each backward behind its forward, use_reentrant=False, or zero_optimization.stage 2"
    )
