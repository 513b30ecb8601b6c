"""Gradients of ZeRO 1 and 2 that are reduce-scattered bucket by bucket while the backward runs.

A bucket is sent when the gradients of all its weights are there, in one order on every rank: a bucket that is complete
earlier waits for those before it. For weights that a batch has not used, zeros are sent at the end of the backward.
The message runs on the communicator's own stream; the step waits for it, or the next sum of the same bucket.

Each weight has a home in its buckets, where a product of matrices may write its gradient (``home_of``). Gradients that
autograd makes are copied there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_npu.comm.collectives import scatter_parts
from ds_npu.comm.pending import Pending
from ds_npu.zero_ext.bucket_memory import BucketedGroup, BucketMemory, Key
from ds_npu.zero_ext.bucket_plan import BucketPiece, Run

IN_FLIGHT = 4
"""Buckets of ZeRO 2 that are in flight at one time; in ZeRO 1 they take no more memory than the gradients in them."""


class PartitionGradient(list[torch.Tensor]):
    """The gradient of a rank's partition in DeepSpeed's form.

    It is a list of views of ``flat_partition``, in order; those of padding are marked.
    """

    def __init__(self, flat: torch.Tensor, runs: Sequence[Run]) -> None:
        super().__init__()
        self._runs = runs
        self._set(flat)

    def move_flat_partition(self, device: Any, non_blocking: bool = False) -> None:
        """Move it to another device; DeepSpeed's offload_states calls it."""
        self._set(self.flat_partition.to(device, non_blocking=non_blocking))

    def _set(self, flat: torch.Tensor) -> None:
        self.flat_partition, end = flat, 0
        self.clear()
        for run in (*self._runs, Run(-1, 0, flat.numel(), 0)):
            if run.start > end:
                padding: Any = flat[end : run.start]
                padding._zero_padding = True
                self.append(padding)
            if run.numel:
                self.append(flat[run.start : run.start + run.numel])
            end = run.start + run.numel


@dataclass(frozen=True)
class _Sum:
    """The sum of one bucket, in flight, and the shard that it is added to; None: it is written there at once."""

    pending: Pending[torch.Tensor]
    shard: torch.Tensor | None
    divisor: float
    """The number by which the sum is still to be divided."""

    def wait(self) -> None:
        found = self.pending.wait()
        if self.shard is not None:
            self.shard.add_(found, alpha=1 / self.divisor)
        elif self.divisor != 1:
            found.div_(self.divisor)


class BucketedGradients:
    """The gradients of one DeepSpeedZeroOptimizer between its backwards and its step."""

    def __init__(self, optimizer: Any, groups: Mapping[int, BucketedGroup], order: Sequence[Key]) -> None:
        """``groups``: by index; ``order``: all buckets, as they are sent."""
        self._optimizer, self._groups, self._order = optimizer, groups, order
        self._position = {key: position for position, key in enumerate(order)}
        self._memory = BucketMemory(groups, self._sent_as, self._before_more)
        self._pieces: dict[int, tuple[int, tuple[BucketPiece, ...]]] = {}
        self._weights_of: Counter[Key] = Counter()
        for index, group in groups.items():
            for position, weight in enumerate(group.weights):
                pieces = tuple(group.plan.pieces(position))
                self._pieces[id(weight)] = index, pieces
                self._weights_of.update((index, each.bucket) for each in pieces)
        self._calls: Counter[int] = Counter()
        """How often the gradient of each weight has come in this backward, by id."""
        self._expected: Counter[int] | None = None
        """For each weight, the most calls in one backward so far; None before the first."""
        self._sums: dict[int, torch.Tensor] = {}
        self._written: set[Key] = set()
        self._in_flight: list[_Sum] = []
        self._begin()

    @property
    def is_open(self) -> bool:
        """Whether a backward has filled buckets and not ended."""
        return bool(self._filled)

    def _begin(self) -> None:
        self._filled: set[int] = set()
        self._missing = Counter(self._weights_of)
        self._next = 0

    def buffers(self) -> Iterator[torch.Tensor]:
        """Buckets that are being filled, and sums."""
        yield from self._memory.spans()
        yield from self._sums.values()

    def home_of(self, weight: nn.Parameter, dtype: torch.dtype) -> torch.Tensor | None:
        """The memory [the weight's shape] for the first gradient of ``weight`` since it was sent, which becomes its
        ``grad``; None where its gradients are not kept as they are sent, or one of them was sent in this backward.
        """
        if self._optimizer.use_grad_accum_attribute or id(weight) in self._filled:
            return None
        return self._memory.home(weight, dtype)

    def come(self, weight: nn.Parameter) -> None:
        """Fill buckets once the gradient of ``weight`` is complete.

        A reentrant recomputation brings the gradient of a shared weight several times.
        """
        self._calls[id(weight)] += 1
        if self._expected is None:
            is_last = bool(self._optimizer.partition_gradients)
        else:
            is_last = self._calls[id(weight)] >= self._expected[id(weight)]
        if is_last:
            self.fill(weight)

    @torch.no_grad()
    def fill(self, weight: nn.Parameter) -> None:
        """Put the gradient of ``weight`` into its buckets, where it is added to what came before; send complete ones.

        Raises RuntimeError where one of them was sent before.
        """
        gradient = self._optimizer.get_gradient_for_reduction(weight)
        index, pieces = self._pieces[id(weight)]
        again = id(weight) in self._filled
        is_there = gradient is not None and self._memory.is_home(weight, gradient)
        for piece in () if is_there else pieces:
            key = index, piece.bucket
            if again and self._position[key] < self._next:
                raise RuntimeError(_came_again(self._optimizer, weight))
            part = self._memory.bucket(key)[piece.start : piece.start + piece.numel]
            if gradient is None:
                part.zero_()
                continue
            found = gradient.detach().reshape(-1)[piece.first : piece.first + piece.numel]
            part.add_(found) if again else part.copy_(found)
        if gradient is not None:
            self._optimizer.clear_grad_attribute(weight)
        if not again:
            self._filled.add(id(weight))
            self._missing.subtract((index, piece.bucket) for piece in pieces)
        self._send_complete()

    @torch.no_grad()
    def end_backward(self) -> None:
        """Send what is left: zeros for weights without a gradient. At a boundary the step gets the sums."""
        for group in self._groups.values():
            for weight in group.weights:
                has_gradient = self._optimizer.get_gradient_for_reduction(weight) is not None
                if has_gradient or id(weight) not in self._filled:
                    self.fill(weight)
        self._send_complete()
        assert self._next == len(self._order), "all weights are filled"
        self._expected = (self._expected or Counter()) | self._calls
        self._calls.clear()
        self._begin()
        if self._optimizer.is_gradient_accumulation_boundary():
            self._wait(0)
            for index, group in self._groups.items():
                self._optimizer.averaged_gradients[index] = PartitionGradient(self._sum(index), group.runs)
            self._sums, self._written = {}, set()

    def _sent_as(self) -> torch.dtype:
        """The dtype of messages: DeepSpeed sums over context ranks in float32 (0.19.8 stage_1_and_2.py:2372)."""
        dtype: torch.dtype = self._optimizer.communication_data_type
        is_narrow = self._optimizer.sequence_parallel_size > 1 and dtype != torch.float64
        return torch.float32 if is_narrow else dtype

    def _send_complete(self) -> None:
        while self._next < len(self._order) and self._missing[self._order[self._next]] == 0:
            self._send(self._order[self._next])
            self._next += 1

    def _send(self, key: Key) -> None:
        group = self._groups[key[0]]
        bucket = group.plan.buckets[key[1]]
        buffer = self._memory.take(key)
        divisor = self._divisor()
        if not is_exact_behind_a_sum(divisor, buffer.dtype):
            buffer.div_(divisor)
            divisor = 1
        shard = self._sum(key[0])[bucket.owned : bucket.owned + bucket.shard]
        is_first = key not in self._written
        self._written.add(key)
        is_direct = is_first and shard.dtype == buffer.dtype
        if is_first and not is_direct:
            shard.zero_()
        if group.size == 1:
            shard.copy_(buffer) if is_direct else shard.add_(buffer, alpha=1 / divisor)
            if is_direct:
                shard.div_(divisor)
            return
        out = shard if is_direct else buffer.new_empty(bucket.shard)
        pending = scatter_parts(out, buffer.view(group.size, bucket.shard), group.ranks)
        self._in_flight.append(_Sum(pending, None if is_direct else shard, divisor))

    def _divisor(self) -> float:
        """The number by which sums over the ranks are divided."""
        if not self._optimizer.gradient_average:
            return 1
        # Context ranks have shares of a loss, so that gradients are summed over them (architecture.md, the rule).
        size: int = dist.get_world_size(self._optimizer.dp_process_group)
        return size / int(self._optimizer.sequence_parallel_size)

    def _sum(self, index: int) -> torch.Tensor:
        """A group's partition of the sums since the last step; the first message of each bucket initialises it."""
        if index not in self._sums:
            group = self._groups[index]
            dtype = self._optimizer.gradient_accumulation_dtype
            self._sums[index] = torch.empty(group.partition, dtype=dtype, device=group.device)
        return self._sums[index]

    def _before_more(self) -> None:
        """Bound the memory of ZeRO 2, whose gradients are sent while others are computed."""
        if self._optimizer.partition_gradients:
            self._wait(IN_FLIGHT - 1)

    def _wait(self, most: int) -> None:
        """Wait, on the current stream, until ``most`` messages are in flight at most."""
        while len(self._in_flight) > most:
            self._in_flight.pop(0).wait()


def is_exact_behind_a_sum(divisor: float, dtype: torch.dtype) -> bool:
    """Whether a sum may be divided instead of its n summands.

    To divide these takes a pass over n times as much memory.

    Dividing by a power of two rounds nothing, in either place; but sums of float16 may pass its range.
    """
    return dtype != torch.float16 and math.frexp(divisor)[0] == 0.5


def ended_early(without_overlap: str) -> RuntimeError:
    """The error of a forward after a backward that was cut short.

    ``without_overlap``: what ``overlap_comm`` false does, in words.
    """
    return RuntimeError(
        "forward(): the backward before it ended with an error after a part of its gradients was sent to other data "
        "ranks, which cannot be taken back. What to do: end this run and resume from the last checkpoint; or set "
        f"zero_optimization.overlap_comm to false, which {without_overlap}"
    )


def _came_again(optimizer: Any, weight: nn.Parameter) -> str:
    name = optimizer.param_names.get(weight, "a weight")
    return (
        f"{name}: its gradient came again in a backward after it was sent to the other ranks, more often than in any "
        "backward before (a recomputation with use_reentrant that does not run in each batch). What to do: set "
        "zero_optimization.overlap_comm to false, which reduces gradients behind the backward, or use_reentrant=False"
    )
