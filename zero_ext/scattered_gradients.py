"""Large gradients of ZeRO 3, which are sent from the memory in which they were computed.

DeepSpeed (0.19.8 runtime/zero/stage3.py) copies gradients into a bucket of ``reduce_bucket_size``, copies them again
so that the parts of each rank are one after the other, and divides them: six times their bytes pass the memory. A
gradient whose elements the ranks divide evenly has its parts in that order by itself. Where it is large enough for a
message it is one, and its sum is written to the rank's partition, and divided there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn

from ds_npu.comm.collectives import scatter_parts
from ds_npu.config.zero_buckets import why_not_scattered
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.bucketed_gradients import is_exact_behind_a_sum
from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method
from ds_npu.zero_ext.stage_3_corrections import PARTITIONS

LEAST = 4_000_000
"""Elements of a gradient that is a message: in bf16, 1 MiB for each of eight ranks."""
IN_FLIGHT = 4
"""Gradients that are kept for their messages at one time."""
Reduce = Callable[[nn.Parameter], None]


class ScatteredGradients:
    """The large gradients of one DeepSpeedZeroOptimizer_Stage3."""

    def __init__(self, optimizer: Any, data_ranks: int) -> None:
        """``data_ranks``: the number by which sums are divided (``average_over_data_ranks``)."""
        self._optimizer, self._divisor = optimizer, data_ranks
        self._stream: Any = optimizer.reduce_and_partition_stream
        self._come: set[int] = set()
        """The ids of weights whose gradients have come since the last forward."""
        self._kept: deque[tuple[Any, torch.Tensor]] = deque()
        """Gradients that messages read, each with the event behind its message."""

    def install(self) -> None:
        """Send from now on; what DeepSpeed's buckets held for large gradients is freed."""
        name = "reduce_independent_p_g_buckets_and_remove_grads"
        wrap_method(self._optimizer, name, self._reduce, MethodLevel.BUCKETS)
        wrap_method(self._optimizer, "clear_backward_seen_flag", self._begin_forward, MethodLevel.BUCKETS)
        self._shrink_buckets()

    def forget(self) -> None:
        """Drop gradients that are kept for messages, all of which the current stream waits for."""
        self._kept.clear()

    def _begin_forward(self, clear: Callable[[], None]) -> None:
        self._come.clear()
        clear()

    def _reduce(self, reduce: Reduce, weight: nn.Parameter) -> None:
        holder: Any = weight
        if getattr(holder, "ds_grad_is_ready", True):
            if id(weight) in self._come:
                # DeepSpeed would write it over the gradient that came before.
                raise RuntimeError(_came_again(self._optimizer, weight))
            self._come.add(id(weight))
            if self._is_message(weight):
                self._send(weight)
                return
        reduce(weight)

    def _can_be_message(self, weight: nn.Parameter) -> bool:
        holder: Any = weight
        ranks = dist.get_world_size(self._optimizer._get_param_partition_group(weight))
        is_even = ranks > 1 and holder.ds_numel % ranks == 0
        return is_even and holder.ds_numel >= LEAST and is_exact_behind_a_sum(self._divisor, weight.dtype)

    def _is_message(self, weight: nn.Parameter) -> bool:
        gradient, sent_as = weight.grad, self._optimizer.get_param_comm_dtype(weight)
        is_as_sent = gradient is not None and gradient.dtype == sent_as and gradient.is_contiguous()
        return is_as_sent and self._can_be_message(weight)

    @torch.no_grad()
    def _send(self, weight: nn.Parameter) -> None:
        optimizer, accelerator = self._optimizer, get_accelerator()
        holder: Any = weight
        gradient = weight.grad
        assert gradient is not None, "it is a message"
        group = optimizer._get_param_partition_group(weight)
        parts = gradient.view(dist.get_world_size(group), -1)
        partition = getattr(optimizer, PARTITIONS)[holder.ds_id][: parts.shape[1]]
        is_first = optimizer.micro_step_id == 0
        is_direct = is_first and partition.dtype == gradient.dtype
        if self._stream is not None:
            self._stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._stream):
            out = partition if is_direct else torch.empty_like(parts[0])
            scatter_parts(out, parts, group).wait()
            if is_direct:
                out.div_(self._divisor)
            elif is_first:
                partition.copy_(out).div_(self._divisor)
            else:
                partition.add_(out, alpha=1 / self._divisor)
        weight.grad = None
        if self._stream is not None:
            self._keep(gradient)

    def _keep(self, gradient: torch.Tensor) -> None:
        """Keep it until the computing stream has waited for its message, and can use its memory again.

        The allocator would ask the host when a message has ended, and take other memory while the host runs ahead.
        """
        accelerator = get_accelerator()
        event = accelerator.Event()
        event.record(self._stream)
        self._kept.append((event, gradient))
        if len(self._kept) > IN_FLIGHT:
            accelerator.current_stream().wait_event(self._kept.popleft()[0])

    def _shrink_buckets(self) -> None:
        """Make buckets as large as all gradients that are copied to them need, at most; the rest was for large ones."""
        optimizer = self._optimizer
        weights = [each for group in optimizer.fp16_groups for each in group if each.requires_grad]
        copied = sum(each.ds_numel for each in weights if not self._can_be_message(each))
        optimizer.reduce_bucket_size = min(optimizer.reduce_bucket_size, max(copied, 1))
        for bucket in optimizer.ipg_buckets.values():
            if bucket.buffer is not None:
                bucket.buffer = bucket.buffer.new_empty(optimizer.reduce_bucket_size)


def scatter_large_gradients(engine: Any, optimizer: Any, topology: Topology) -> Callable[[], None]:
    """Send the large gradients of ``optimizer``, ZeRO 3's, as they are, unless its config has a key against it.

    Returns a function to be called where the current stream has waited for all messages.
    """
    if type(optimizer) is not DeepSpeedZeroOptimizer_Stage3 or why_not_scattered(engine._config._param_dict):
        return lambda: None
    scattered = ScatteredGradients(optimizer, topology.size("dp"))
    scattered.install()
    return scattered.forget


def _came_again(optimizer: Any, weight: nn.Parameter) -> str:
    name = optimizer.param_names.get(weight, "a weight")
    return (
        f"{name}: its gradient came twice since the last forward, and ZeRO 3 would write the second over the first "
        "(two backwards behind two forwards, or a weight that two recomputations with use_reentrant share). What to "
        "do: run each backward behind its forward, use_reentrant=False, or zero_optimization.stage 2"
    )
