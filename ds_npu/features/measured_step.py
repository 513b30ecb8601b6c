"""One optimizer step of an engine in which every storage is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_npu.memory.memory_use import (
    ACTIVATIONS,
    BACKWARD,
    BETWEEN,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    MemoryUse,
    memory_use,
)
from ds_npu.memory.storage_record import StorageRecord
from ds_npu.models import names
from ds_npu.models.attributes import attribute, attributes
from ds_npu.parallel.runtime.arrival import ARRIVAL
from ds_npu.parallel.runtime.micro_batch import is_in_backward
from ds_npu.zero_ext.bucketed_zero import BUCKETED
from ds_npu.zero_ext.method_wraps import MethodLevel
from ds_npu.zero_ext.training_engine import TrainingEngine

BUCKET = "ipg"
"""A part of the names of ZeRO's gradient buckets, which it makes in backward."""
OF_GRADIENTS = ("grad", BUCKET, "reduce")
"""Parts of the attribute paths under which an optimizer holds gradients."""


class MeasuredStep:
    """Records the storages of ``engine``, a DeepSpeed engine, from now until ``finish``."""

    def __init__(self, engine: TrainingEngine, rank: int) -> None:
        self._engine, self._rank = engine, rank
        self._running: list[str] = []
        """Modules whose forward runs, innermost last."""
        self._depth = 0
        device_type = torch.device(engine.device).type
        self._device: Any = None if device_type == "cpu" else torch.get_device_module(device_type)
        if self._device is not None:
            self._device.reset_peak_memory_stats()
        self.record = StorageRecord(device_type, self._use, None if self._device is None else self._allocated)
        self._see_what_is_there()
        self._undo = ExitStack()
        # Hooks follow which module runs forward, and mark weights that ZeRO gathers, and gradients, when they are made.
        for name, module in engine.module.named_modules():
            self._follow(names.generic(names.plain(name)) or type(module).__name__, module)
        for weight in engine.module.parameters():
            if weight.requires_grad:
                hooked: Any = weight
                self._undo.callback(hooked.register_hook(partial(self._see_gradient, weight)).remove)
        for undo in engine.events.around_calls(MethodLevel.RECORDED_STEP, self._recording):
            self._undo.callback(undo)

    def finish(self) -> MemoryUse:
        """Stop recording; returns the uses of the memory."""
        self._see_what_is_there()
        self.record.close()
        self._undo.close()
        reserved = outside = None
        if self._device is not None:
            reserved = int(self._stats()["reserved_bytes"]["all"]["peak"])
            free, total = self._device.mem_get_info()
            outside = total - free - int(self._stats()["reserved_bytes"]["all"]["current"])
        return memory_use(self._rank, self.record, reserved, outside)

    def _use(self) -> str:
        if is_in_backward():
            return BACKWARD
        return ACTIVATIONS + self._running[-1] if self._running else BETWEEN

    def _stats(self) -> Any:
        return self._device.memory.memory_stats_as_nested_dict()

    def _allocated(self) -> tuple[int, int]:
        found = self._stats()["allocated_bytes"]["all"]
        return int(found["current"]), int(found["peak"])

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Record while a call of the engine runs, which may call another one."""
        self._depth += 1
        try:
            with self.record if self._depth == 1 else nullcontext():
                yield
        finally:
            self._depth -= 1

    def _follow(self, name: str, module: nn.Module) -> None:
        def enter(*_: object) -> None:
            self._running.append(name)

        def leave(*_: object) -> None:
            self._running.pop()
            for weight in module.parameters(recurse=False):
                self.record.see(weight, WEIGHTS)

        self._undo.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
        self._undo.callback(module.register_forward_hook(leave, prepend=True, always_call=True).remove)

    def _see_gradient(self, weight: nn.Parameter, gradient: torch.Tensor) -> None:
        self.record.see(gradient, GRADIENTS)
        self.record.see(weight, WEIGHTS)
        optimizer = self._engine.optimizer
        buckets = attributes(optimizer, object) if _is_own(optimizer) else {}
        for _, bucket in _tensors([each for name, each in buckets.items() if BUCKET in name], "", {}):
            self.record.see(bucket, GRADIENTS)
        bucketed = BUCKETED.get(optimizer) if _is_own(optimizer) else None
        for bucket in bucketed.gradients.buffers() if bucketed else ():
            self.record.see(bucket, GRADIENTS)

    def _see_what_is_there(self) -> None:
        """Record the use of the optimizer's tensors, then of gradients and weights, some of which it also holds."""
        model = self._engine.module
        optimizer = self._engine.optimizer
        found = list(_tensors(optimizer, "", {}))
        for path, tensor in found:
            if not any(word in path for word in OF_GRADIENTS):
                self.record.see(tensor, OPTIMIZER)
        for path, tensor in found:
            if any(word in path for word in OF_GRADIENTS):
                self.record.see(tensor, GRADIENTS)
        for weight in [*model.parameters(), *model.buffers()]:
            arrival = ARRIVAL.get(weight)
            self.record.see(weight if arrival is None else arrival.values, WEIGHTS)
            shard = attribute(weight, "ds_tensor", torch.Tensor)
            if shard is not None:
                self.record.see(shard, WEIGHTS)
            if weight.grad is not None:
                self.record.see(weight.grad, GRADIENTS)


def _tensors(holder: object, path: str, known: dict[int, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Paths and tensors in the attributes, lists and dicts of ``holder``; ``known``: objects visited, by id."""
    if id(holder) in known:
        return
    known[id(holder)] = holder
    if isinstance(holder, torch.Tensor):
        yield path, holder
        if holder.is_leaf and holder.grad is not None:
            yield f"{path}.grad", holder.grad
    elif isinstance(holder, dict):
        for key, value in list(holder.items()):
            yield from _tensors(value, f"{path}.{key}" if isinstance(key, str) else path, known)
    elif isinstance(holder, list | tuple | set):
        for value in list(holder):
            yield from _tensors(value, path, known)
    elif isinstance(holder, torch.optim.Optimizer) or _is_own(holder):
        yield from _tensors(attributes(holder, object), path, known)


def _is_own(holder: object) -> bool:
    """Whether ``holder`` is an object of DeepSpeed or ds_npu, and neither a module nor an engine."""
    is_own = type(holder).__module__.startswith(("deepspeed.", "ds_npu."))
    return is_own and hasattr(holder, "__dict__") and not isinstance(holder, nn.Module)
