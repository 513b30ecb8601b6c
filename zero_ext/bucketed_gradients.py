"""Gradients of ZeRO 1 and 2 that are reduce-scattered bucket by bucket while the backward runs.

A bucket is sent when the gradients of all its weights are there, in one order on every rank: a bucket that is complete
earlier waits for those before it. What a batch has not used is zero, and sent at the end of the backward. The message
runs on the communicator's own stream; the step waits for it, or the next sum of the same bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_npu.comm.collectives import scatter_parts
from ds_npu.comm.pending import Pending
from ds_npu.zero_ext.bucket_plan import Bucket, BucketPiece, BucketPlan, Run

IN_FLIGHT = 4
"""Buckets of ZeRO 2 that are in flight at one time; in ZeRO 1 they take no more memory than the gradients in them."""
Key = tuple[int, int]
"""The indices of a group of weights and of a bucket of it."""


@dataclass(frozen=True)
class BucketedGroup:
    """One group of an optimizer's weights, which has a flat buffer of its own, over the data ranks that share it."""

    weights: Sequence[nn.Parameter]
    """In the order of the buffer."""
    device: torch.device
    plan: BucketPlan
    ranks: dist.ProcessGroup
    size: int
    """The number of those ranks."""
    rank: int
    runs: tuple[Run, ...]
    """The runs of this rank's partition, in order."""

    @property
    def partition(self) -> int:
        """Elements of a rank's partition."""
        return sum(bucket.shard for bucket in self.plan.buckets)


class PartitionGradient(list[torch.Tensor]):
    """The gradient of a rank's partition as DeepSpeed keeps it: its pieces in order, padding marked, and all in one."""

    def __init__(self, flat: torch.Tensor, runs: Sequence[Run]) -> None:
        super().__init__()
        self._runs = runs
        self._set(flat)

    def move_flat_partition(self, device: Any, non_blocking: bool = False) -> None:
        """DeepSpeed's call to move it to another device (offload_states)."""
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
    """A sum of one bucket in flight, and what it is added to; None: it is written where it belongs."""

    pending: Pending[torch.Tensor]
    shard: torch.Tensor | None

    def wait(self) -> None:
        found = self.pending.wait()
        if self.shard is not None:
            self.shard.add_(found)


class BucketedGradients:
    """The gradients of one DeepSpeedZeroOptimizer between its backwards and its step."""

    def __init__(self, optimizer: Any, groups: Mapping[int, BucketedGroup], order: Sequence[Key]) -> None:
        """``groups`` by index; ``order``: of all buckets, in which they are sent."""
        self._optimizer, self._groups, self._order = optimizer, groups, order
        self._is_host: bool = get_accelerator().is_synchronized_device()
        self._pieces: dict[int, tuple[int, tuple[BucketPiece, ...]]] = {}
        self._weights_of: Counter[Key] = Counter()
        self._used: Counter[Key] = Counter()
        for index, group in groups.items():
            for position, weight in enumerate(group.weights):
                pieces = tuple(group.plan.pieces(position))
                self._pieces[id(weight)] = index, pieces
                self._weights_of.update((index, each.bucket) for each in pieces)
                for each in pieces:
                    self._used[index, each.bucket] += each.numel
        self._calls: Counter[int] = Counter()
        """How often the gradient of each weight has come in this backward, by id."""
        self._expected: Counter[int] | None = None
        """The most that was seen in a backward; None before the first."""
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
        self._open: dict[Key, torch.Tensor] = {}
        self._streams: dict[Key, set[Any]] = {}
        """The streams on which buckets are filled."""
        self._missing = Counter(self._weights_of)
        self._next = 0

    def buffers(self) -> Iterator[torch.Tensor]:
        """Buckets that are being filled, and sums."""
        yield from self._open.values()
        yield from self._sums.values()

    def come(self, weight: nn.Parameter) -> None:
        """The gradient of ``weight`` has come; a reentrant recomputation brings that of a shared one several times."""
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
        for piece in pieces:
            key = index, piece.bucket
            if again and key not in self._open:
                raise RuntimeError(_came_again(self._optimizer, weight))
            part = self._buffer(key)[piece.start : piece.start + piece.numel]
            if not self._is_host:
                self._streams.setdefault(key, set()).add(get_accelerator().current_stream())
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

    def _buffer(self, key: Key) -> torch.Tensor:
        """The buffer of a bucket in this backward; padding in it is zero."""
        if key not in self._open:
            group, bucket = self._groups[key[0]], self._bucket(key)
            if self._optimizer.partition_gradients:
                self._wait(IN_FLIGHT - 1)
            make = torch.empty if self._used[key] == bucket.numel else torch.zeros
            self._open[key] = make(bucket.numel, dtype=self._sent_as(), device=group.device)
        return self._open[key]

    def _bucket(self, key: Key) -> Bucket:
        return self._groups[key[0]].plan.buckets[key[1]]

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
        optimizer, group, bucket = self._optimizer, self._groups[key[0]], self._bucket(key)
        buffer = self._buffer(key)
        del self._open[key]
        for stream in self._streams.pop(key, ()):
            get_accelerator().current_stream().wait_stream(stream)
        if optimizer.gradient_average:
            # Context ranks have shares of a loss, so that gradients are summed over them (architecture.md, the rule).
            data_size = dist.get_world_size(optimizer.dp_process_group) / optimizer.sequence_parallel_size
            buffer.div_(data_size)
        shard = self._sum(key[0])[bucket.owned : bucket.owned + bucket.shard]
        is_first = key not in self._written
        self._written.add(key)
        is_direct = is_first and shard.dtype == buffer.dtype
        if is_first and not is_direct:
            shard.zero_()
        if group.size == 1:
            shard.copy_(buffer) if is_direct else shard.add_(buffer)
            return
        out = shard if is_direct else buffer.new_empty(bucket.shard)
        pending = scatter_parts(out, buffer.view(group.size, bucket.shard), group.ranks)
        self._in_flight.append(_Sum(pending, None if is_direct else shard))

    def _sum(self, index: int) -> torch.Tensor:
        """The sums of a group's partition since the last step; each bucket's first message writes it."""
        if index not in self._sums:
            group, dtype = self._groups[index], self._optimizer.gradient_accumulation_dtype
            self._sums[index] = torch.empty(group.partition, dtype=dtype, device=group.device)
        return self._sums[index]

    def _wait(self, most: int) -> None:
        """Wait, on the current stream, until ``most`` messages are in flight at most."""
        while len(self._in_flight) > most:
            self._in_flight.pop(0).wait()


def _came_again(optimizer: Any, weight: nn.Parameter) -> str:
    name = optimizer.param_names.get(weight, "a weight")
    return (
        f"{name}: its gradient came again in a backward after it was sent to the other ranks, more often than in any "
        "backward before (a recomputation with use_reentrant that does not run in each batch). What to do: set "
        "zero_optimization.overlap_comm to false, which reduces gradients behind the backward, or use_reentrant=False"
    )
