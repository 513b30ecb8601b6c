"""Messages in which ZeRO 3 gathers weights, each into memory that is used again, and copied out on another stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_npu.comm.collectives import gather_into
from ds_npu.comm.pending import Work

Weight = Any
"""A parameter with the attributes that DeepSpeed's zero.Init gives it."""
Weights = Sequence[Weight]


class SentPart(NamedTuple):
    """The weights of one dtype and one group of ranks in a message."""

    weights: Weights
    received: torch.Tensor
    """[ranks, elements that each rank holds of them]"""
    work: Work


class GatheringStreams(NamedTuple):
    """The streams on which an NPU gathers weights."""

    sends: Any
    copies: Any
    """Copies weights out of messages, while the next message travels."""


class MessageMemory:
    """Memory for one message at a time, for each dtype and group of ranks."""

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self.emptied: Any = None
        """The event after which the message before has been copied out; None on the CPU."""

    def of(self, key: tuple[torch.dtype, int], ranks: int, elements: int) -> torch.Tensor:
        """Memory [ranks, elements] with undefined values."""
        memory = self._memory.get(key)
        if memory is None or memory.numel() < ranks * elements:
            self._memory.pop(key, None)
            device = get_accelerator().current_device_name()
            memory = self._memory[key] = torch.empty(ranks * elements, dtype=key[0], device=device)
        return memory[: ranks * elements].view(ranks, elements)


class MessageInFlight:
    """Weights that are gathered; until ``arrive`` nobody may read them."""

    def __init__(self, weights: Weights, memory: MessageMemory, streams: GatheringStreams | None) -> None:
        """Send the message. ``streams``: None on the CPU, where arriving waits for the message."""
        self.weights = weights
        self._event: Any = None
        for weight in weights:
            weight.ds_status = ZeroParamStatus.INFLIGHT
        if streams is None:
            self._parts = [_send(part, memory) for part in _by_ranks(weights)]
            return
        accelerator = get_accelerator()
        for stream in streams:
            # After all work that is queued now, nothing computes with released weights, whose memory may be used.
            stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(streams.sends):
            if memory.emptied is not None:
                streams.sends.wait_event(memory.emptied)
            self._parts = [_send(part, memory) for part in _by_ranks(weights)]
        with accelerator.stream(streams.copies):
            self._copy_out()
            self._event = memory.emptied = streams.copies.record_event()

    def arrive(self) -> None:
        """Let the current stream wait for the weights, and mark them as available."""
        if self._event is None:
            self._copy_out()
        else:
            get_accelerator().current_stream().wait_event(self._event)
        for weight in self.weights:
            weight.ds_status = ZeroParamStatus.AVAILABLE

    def _copy_out(self) -> None:
        for weights, received, work in self._parts:
            work.wait()
            first = 0
            for weight in weights:
                shard = weight.ds_tensor.ds_numel
                whole = torch.empty(len(received), shard, dtype=received.dtype, device=received.device)
                whole.copy_(received[:, first : first + shard])
                weight.data = whole.view(-1)[: weight.ds_numel].view(weight.ds_shape)
                first += shard
        self._parts = []


def is_whole_here(weight: Weight) -> bool:
    """Whether ``weight`` is sharded over one rank, as experts may be: its shard is all of it."""
    return dist.get_world_size(weight.ds_process_group) == 1


def show_shard(weight: Weight) -> None:
    """Make a weight that is whole here a view of its shard, which takes no message and no memory."""
    shard = weight.ds_tensor.to(get_accelerator().current_device_name())
    weight.data = shard.view(-1)[: weight.ds_numel].view(weight.ds_shape)
    weight.ds_status = ZeroParamStatus.AVAILABLE


def _by_ranks(weights: Weights) -> Iterator[Weights]:
    parts: dict[tuple[torch.dtype, int], list[Weight]] = {}
    for weight in weights:
        parts.setdefault((weight.ds_tensor.dtype, id(weight.ds_process_group)), []).append(weight)
    yield from parts.values()


def _send(weights: Weights, memory: MessageMemory) -> SentPart:
    group: Any = weights[0].ds_process_group
    ranks = dist.get_world_size(group)
    rank = dist.get_rank(group)
    elements = sum(weight.ds_tensor.ds_numel for weight in weights)
    received = memory.of((weights[0].ds_tensor.dtype, id(group)), ranks, elements)
    torch.cat([weight.ds_tensor.to(received.device).view(-1) for weight in weights], out=received[rank])
    return SentPart(weights, received, gather_into(received.view(-1), received[rank], group))
