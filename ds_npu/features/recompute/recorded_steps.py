"""Records what a plan needs in steps in which every block is computed again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_npu.features.build import Build
from ds_npu.features.loss.model_loss import loss_chunks_of
from ds_npu.features.recompute.block_record import BlockRecord
from ds_npu.features.recompute.recomputed_calls import is_recomputed, without_cache
from ds_npu.memory.recomputation import Recomputation
from ds_npu.memory.storage_record import PeakMeter
from ds_npu.parallel.runtime.forward_wraps import (
    Forward,
    Level,
    Wrapper,
    first_parameter_name,
    unwrap_forward,
    wrap_forward,
)
from ds_npu.parallel.runtime.micro_batch import closing_over_micro_batch
from ds_npu.planner.chunk_choice import ChunkedHead
from ds_npu.planner.memory_plan import Moment, PlannedLayer
from ds_npu.planner.memory_plan_table import LOSS
from ds_npu.topology.machine import Machine


class _RecordedCall(Recomputation):
    """One call of a block, which reports the start of its backward, and the tensors that it saves."""

    def __init__(
        self, function: Callable[..., Any], device_type: str, saves: Callable[[torch.Tensor], None] | None
    ) -> None:
        super().__init__(function, device_type)
        self.saves = saves
        self.begins: Callable[[], None] | None = None

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self.saves is not None:
            with torch._C.DisableTorchFunctionSubclass():
                self.saves(tensor)
        return super()._pack(tensor)

    def _compute(self) -> None:
        if self.begins is not None:
            self.begins()
            self.begins = None
        super()._compute()


class RecordedSteps:
    """Records the blocks of ``build``'s model, and the peaks between their calls."""

    def __init__(self, build: Build, meter: PeakMeter, machine: Machine) -> None:
        self.names = list(build.block_plan.blocks)
        self._build, self._meter, self._machine = build, meter, machine
        self._records: dict[int, BlockRecord] = {}
        """The record of the call with most tokens, by the block's index."""
        self._calls = [0] * (len(self.names) + 1)
        """How many forwards of each block wait for their backward; last, how many losses are being computed."""
        self._chunks = loss_chunks_of(build.model)
        self._head: ChunkedHead | None = None
        """The head of the loss with most tokens, where a plan chooses its chunks."""
        self._what = "the first forward"
        self._in_forward: int | None = None
        self._in_backward: int | None = None
        self._peaks: dict[tuple[tuple[int, ...], int | None, int | None], tuple[int, str]] = {}
        self._wraps: list[tuple[nn.Module, Wrapper]] = []

    def wrap(self) -> None:
        for index, name in enumerate(self.names):
            module = self._build.model.get_submodule(name)
            wrapper = partial(self._block, index, module)
            wrap_forward(module, wrapper, Level.RECOMPUTE)
            self._wraps.append((module, wrapper))
        if self._chunks is not None and self._chunks.is_planned:
            self._chunks.around = self._loss

    def unwrap(self) -> None:
        for module, wrapper in self._wraps:
            unwrap_forward(module, wrapper)
        self._wraps.clear()
        if self._chunks is not None:
            self._chunks.around = nullcontext

    def end_of_backward(self) -> None:
        """Count allocations from now on as the optimizer step's; calls that wait will have no backward."""
        self._next("the optimizer step")
        self._calls = [0] * len(self._calls)

    @property
    def layers(self) -> tuple[PlannedLayer, ...]:
        """The blocks that were called, with their options; last the loss, if its chunks are planned."""
        blocks = [
            PlannedLayer(self.names[index], record.options(), record.forward_seconds)
            for index, record in sorted(self._records.items())
        ]
        loss = [] if self._head is None else [PlannedLayer(LOSS, self._head.options(self._machine))]
        return (*blocks, *loss)

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Every combination of waiting calls in the step so far, with its peak."""
        self._next(self._what, self._in_forward, self._in_backward)
        called = [*sorted(self._records), *([] if self._head is None else [len(self.names)])]
        positions = {None: None} | {index: position for position, index in enumerate(called)}
        return tuple(
            Moment(what, peak, tuple(calls[index] for index in called), positions[forward], positions[backward])
            for (calls, forward, backward), (peak, what) in self._peaks.items()
        )

    def modules(self, layer: str, part: str) -> list[str]:
        """The modules of the block ``layer`` that are parts of the kind ``part``; none for the loss."""
        return [] if layer == LOSS else self._records[self.names.index(layer)].modules(part)

    def _next(self, what: str, forward: int | None = None, backward: int | None = None) -> None:
        """End an interval, and begin one in which the forward or the backward of the given block runs."""
        key = tuple(self._calls), self._in_forward, self._in_backward
        self._peaks[key] = max((self._meter.peak(), self._what), self._peaks.get(key, (0, "")))
        self._what = what
        self._in_forward = forward
        self._in_backward = backward

    def _block(self, index: int, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if not is_recomputed(module):
            return forward(*args, **kwargs)
        name = self.names[index]
        self._next(f"the forward of {name}", forward=index)
        self._calls[index] += 1
        kwargs = without_cache(module, kwargs)
        first = first_parameter_name(module)
        hidden = args[0] if args else kwargs[first]
        others = args[1:], {key: value for key, value in kwargs.items() if args or key != first}
        known = self._records.get(index)
        record = BlockRecord(self._build.model, self._build.block_plan, name, self._machine)
        known_bytes = -1 if known is None else sum(known.hidden.values())
        is_new = isinstance(hidden, torch.Tensor) and hidden.nbytes > known_bytes
        made = _RecordedCall(
            closing_over_micro_batch(forward), self._build.device_type, record.saves if is_new else None
        )
        made.begins = partial(self._backward, index)
        if is_new:
            self._records[index] = record
        with record.recording(hidden, others) if is_new else nullcontext():
            out = made(*args, **kwargs)
        made.saves = None
        self._next(f"the forward behind {name}")
        return out

    @contextmanager
    def _loss(self, head: ChunkedHead) -> Iterator[None]:
        if self._head is None or head.tokens > self._head.tokens:
            self._head = head
        before = self._what
        self._next(LOSS)
        self._calls[-1] += 1
        yield
        self._next(before)
        self._calls[-1] -= 1

    def _backward(self, index: int) -> None:
        self._next(f"the backward of {self.names[index]}", backward=index)
        self._calls[index] -= 1
