"""Backwards of several micro-batches whose gradients are reduced once, and whose weight gradients may come later.

DeepSpeed (0.19.8) reduces the gradients of a micro-batch in its backward: ZeRO 2, and ZeRO 1 with overlap_comm, in a
hook on each parameter (runtime/zero/stage_1_and_2.py), which raises outside of a backward
(runtime/utils.py::count_used_parameters_in_backward); the others in the epilogue that ``engine.backward`` runs behind
it (runtime/engine.py). While the reduction is held back, these hooks return at once, and whole gradients are added up
where the optimizer accumulates, under ZeRO 2 too. ``engine.coalesce_grad_reduction`` holds it back in the same way, but
not without ZeRO nor for BF16_Optimizer, and after an exception it reduces what there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_npu.parallel.tensor.direct_layers import (
    LINEARS,
    DirectEmbedding,
    direct_weights,
    is_lookup,
    is_plain,
    use_direct_gradient,
)
from ds_npu.parallel.tensor.weight_gradient import GradientQueue, GradientSink, QueuedGradients, gradient_sink
from ds_npu.zero_ext.gradient_buffer import GRAD_ACCUM, accumulator, foreign_accumulation

Tensors = torch.Tensor | Sequence[torch.Tensor]


class HeldReduction:
    """A context in which the backwards of ``engine``, which is complete, reduce no gradient; it can be entered again.

    At its end all gradients are reduced, once, if the engine is at a boundary of gradient accumulation and not inside
    of its user's ``no_sync``; then the engine may step. Within it call the model itself (``engine.module``), and
    ``backward`` of this object. The caller scales the losses: by the number of micro-batches, and by the loss scale.
    ``hold`` and ``release`` are its two ends for a caller whose user may enter or leave ``no_sync`` between them.

    With ``queue_weight_gradients`` a backward leaves the weight gradients of linear layers and embeddings for later.
    Their operands are kept in memory until then (with sequence parallelism, of the whole sequence). A weight has its
    gradient in backward, as ever, where a user's code multiplies by it or a user's hook changes its gradient.

    Raises ValueError under ZeRO 3, and where it is not known how gradients are accumulated.
    """

    def __init__(self, engine: Any, queue_weight_gradients: bool = False) -> None:
        if reason := _why_not(engine):
            raise ValueError(f"the gradients of {type(engine).__name__} cannot be held back or queued: {reason}")
        self._engine = engine
        self._queues = queue_weight_gradients
        self._queue = GradientQueue()
        self.is_held = False
        self._was_coalesced = self._was_inside_no_sync = False
        if queue_weight_gradients:
            _fill(engine, self._queue)

    def __enter__(self) -> HeldReduction:
        """Raises RuntimeError where the reduction is held back already."""
        self.hold()
        self._was_inside_no_sync = self._engine.inside_no_sync_ctxt
        self._engine.inside_no_sync_ctxt = True  # engine.step() raises meanwhile.
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        """Reduce the gradients, but not behind an exception. Raises RuntimeError where weight gradients are queued."""
        self._engine.inside_no_sync_ctxt = self._was_inside_no_sync
        if kind is None:
            self.release()
        else:
            self.abandon()

    def hold(self) -> None:
        """Begin to hold the reduction back. Raises RuntimeError where it is held back already."""
        if self.is_held:
            raise RuntimeError("the reduction of gradients is held back already: leave that context first")
        optimizer = self._engine.optimizer
        if isinstance(optimizer, ZeROOptimizer):
            optimizer.clear_backward_seen_flag()
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            self._was_coalesced = optimizer._coalesce_grad_reduction
            optimizer._coalesce_grad_reduction = True
        self.is_held = True
        self._queue.is_open = self._queues

    def release(self) -> None:
        """End the hold, and reduce the gradients. Raises RuntimeError where weight gradients are queued."""
        self._end_hold()
        uncomputed = self._queue.close()
        if uncomputed:
            raise RuntimeError(
                f"gradients are to be reduced, and those of {len(uncomputed)} weights are still queued: "
                f"{', '.join(uncomputed)}. What to do: compute() what every backward has returned before"
            )
        if not self.reduces_now:
            return
        optimizer = self._engine.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            optimizer.set_gradient_accumulation_boundary(True)
            add_missing(optimizer)
            self._engine._flush_coalesced_reduction_zero12(optimizer)
        else:
            self._engine.allreduce_gradients()

    def abandon(self) -> None:
        """End the hold, and reduce nothing."""
        self._end_hold()
        self._queue.close()

    @property
    def reduces_now(self) -> bool:
        """Whether gradients are reduced after this backward: at a boundary, outside of the user's ``no_sync``."""
        return bool(self._engine.is_gradient_accumulation_boundary()) and not self._engine.inside_no_sync_ctxt

    def backward(self, outputs: Tensors, gradients: Tensors | None = None) -> QueuedGradients:
        """Backward from ``outputs``, with their ``gradients`` (none for scalars).

        Returns the weight gradients that are left for later, to be computed in the order of the backwards.
        """
        optimizer = self._engine.optimizer
        accumulates = isinstance(optimizer, ZeROOptimizer)
        if accumulates:
            optimizer.backward_prologue()
        torch.autograd.backward(outputs, gradients)
        if accumulates:
            optimizer.backward_epilogue()
        return self._queue.collect()

    def _end_hold(self) -> None:
        self.is_held = False
        if isinstance(self._engine.optimizer, DeepSpeedZeroOptimizer):
            self._engine.optimizer._coalesce_grad_reduction = self._was_coalesced


def _why_not(engine: Any) -> str | None:
    if engine.zero_optimization_partition_weights():
        return "ZeRO 3 reduces the gradient of each weight in its backward; use zero_optimization.stage 0, 1 or 2"
    if not engine.managed_gradient_accumulation():
        return "engine.step() reduces them; leave managed_gradient_accumulation out"
    return foreign_accumulation(engine)


def _fill(engine: Any, queue: GradientQueue) -> None:
    """Let the weight gradients of all linear layers and embeddings of ``engine`` go into ``queue``."""
    for module in list(engine.module.modules()):
        if is_plain(module) or is_lookup(module):
            use_direct_gradient(module)
    buffer_of = accumulator(engine.optimizer)
    for name, weight in direct_weights(engine.module, (*LINEARS, DirectEmbedding)):
        sink = gradient_sink(weight)
        if sink is None and (buffer := buffer_of(weight)) is not None:
            sink = GradientSink(weight, buffer, direct=False)
        if sink is not None:
            sink.name, sink.queue = name, queue


def add_missing(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Give the weights that no batch of this rank has used (of a vision tower, without images) gradients of zeros.

    DeepSpeed 0.19.8 leaves them out of its buckets, and other data ranks, whose batches used them, would wait.
    """
    for weight in (each for group in optimizer.bit16_groups for each in group if each.requires_grad):
        if optimizer.get_gradient_for_reduction(weight) is not None:
            continue
        if optimizer.use_grad_accum_attribute:
            GRAD_ACCUM.set(weight, torch.zeros_like(weight, dtype=optimizer.gradient_accumulation_dtype))
        else:
            weight.grad = torch.zeros_like(weight)
