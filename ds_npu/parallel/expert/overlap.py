"""Computation while a layer's tokens travel: its shared experts, or the other half of the tokens.

The order in a block that computes shared experts after the routed ones, from an input known when those are called:

    tokens sent -> shared up -> tokens received, experts compute, sums sent -> shared down -> sums received

The routed experts call the shared experts' module; when the block calls it, its result is ready. Autograd runs the
youngest of the nodes that are ready, so that backward runs in the reverse order. Sources: MindSpeed
(moe-alltoall-overlap-comm), Megatron-LM (moe-shared-expert-overlap); for two halves DeepSeek-V3 (arXiv:2412.19437).

The routed experts run inside of the shared experts' forward, but are no part of it. Where the shared experts are
recomputed (activation checkpointing), hooks on saved tensors and dispatch modes must not record the routed experts:
``SavingContext``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from ds_npu.comm.pending import identity
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.dispatch import ExpertOptions, Piece
from ds_npu.parallel.expert.experts import DISPATCHERS
from ds_npu.parallel.expert.weights import ExpertWeights
from ds_npu.parallel.runtime.calls import Arguments, Keywords
from ds_npu.parallel.runtime.forward_wraps import Forward

Compute = Callable[[], None]


def compute_experts_with_shared(
    piece: Piece, experts: ExpertWeights, axis: ExpertAxis, options: ExpertOptions, shared: SharedExperts
) -> torch.Tensor:
    """``compute_experts`` of x, ids and weights, overlapped with the ``shared`` experts."""
    (routed,) = DISPATCHERS[options.dispatcher].send([piece], experts, axis, options)
    shared.run(routed.compute)
    return routed.finish()


def compute_experts_in_halves(
    piece: Piece, experts: ExpertWeights, axis: ExpertAxis, options: ExpertOptions
) -> torch.Tensor:
    """``compute_experts`` of x, ids and weights, one half of the tokens after the other.

    The second half's tokens travel while the first half's experts compute, and the sums of the first half while the
    second half's experts compute; likewise in backward. Weight gradients are sums of two, and so differ by rounding.
    """
    halves = zip(*(each.tensor_split(2) for each in piece), strict=True)
    first, second = DISPATCHERS[options.dispatcher].send(list(halves), experts, axis, options)
    first.compute()
    second.compute()
    return torch.cat([first.finish(), second.finish()])


@dataclass
class _Block:
    x: torch.Tensor | None = None
    """The input of the shared experts."""
    state: tuple[object, ...] = ()
    """The state that their result depends on (``_state_of``)."""
    result: object = None
    compute: Compute | None = None
    """Computes the routed experts; None once it has run."""
    graph_task: int = field(default_factory=torch._C._current_graph_task_id)
    """The autograd task of the backward that recomputes the block; -1 in its forward."""

    def compute_now(self) -> None:
        if self.compute is not None:
            compute, self.compute = self.compute, None
            compute()

    def matches(self, x: object) -> bool:
        return self.result is not None and isinstance(x, torch.Tensor) and self.state == _state_of(x)


def _state_of(x: torch.Tensor) -> tuple[object, ...]:
    """All that a result computed from ``x`` depends on.

    The identity of ``x`` is no part of it: hooks of ZeRO 3 pass modules an alias.
    """
    kind = x.device.type
    memory = x.data_ptr(), x.shape, x.stride(), x.dtype, None if x.is_inference() else x._version
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return *memory, x.requires_grad, torch.is_grad_enabled(), autocast


class SharedExperts:
    """The shared experts of one block, computed while tokens travel.

    ``in_block`` wraps the forward of the block, inside all other wraps. Outside all other wraps, ``in_experts`` wraps
    the forward of its routed experts, ``in_shared`` that of its shared experts, ``in_last`` that of their last layer.
    """

    def __init__(self, name: str, of_block_input: bool, find: Callable[[], nn.Module]) -> None:
        """``find`` returns the module; its input is the block's if ``of_block_input``, else the routed experts'."""
        self._name, self._of_block_input, self._find = name, of_block_input, find
        self._block: _Block | None = None

    def in_block(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        outer = self._block
        self._block = _Block(_first(args, kwargs) if self._of_block_input else None)
        try:
            out = forward(*args, **kwargs)
            if self._block.result is not None:
                raise RuntimeError(
                    f"ds_npu.moe.overlap: {self._name} was computed while tokens travelled to their experts, and its "
                    "block then did not call it with the same tensor. What to do: moe.overlap false"
                )
            return out
        finally:
            self._block = outer

    def in_experts(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if self._block is not None and not self._of_block_input:
            self._block.x = _first(args, kwargs)
        return forward(*args, **kwargs)

    def in_shared(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        block = self._block
        if block is not None and block.matches(args[0] if len(args) == 1 and not kwargs else None):
            result, block.result = block.result, None
            return result
        return forward(*args, **kwargs)

    def in_last(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        block = self._block
        # A backward that recomputes the shared experts alone must not run a forward's routed experts.
        if block is not None and block.graph_task == torch._C._current_graph_task_id():
            block.compute_now()
        return forward(*args, **kwargs)

    def run(self, compute: Compute) -> None:
        """Compute the shared experts; call ``compute`` before their last layer."""
        block = self._block
        if block is None or block.x is None:
            compute()
            return
        around = SavingContext()

        def compute_outside() -> None:
            # Recomputation of the shared experts in backward must not record the routed ones.
            with around.entered():
                compute()

        block.state = _state_of(block.x)
        block.compute = compute_outside
        # Not a call of the module: its hooks run in the block's own call, which follows.
        block.result = self._find().forward(block.x)
        block.compute_now()


def _first(args: Arguments, kwargs: Keywords) -> torch.Tensor | None:
    found = next(iter((*args, *kwargs.values())), None)
    return found if isinstance(found, torch.Tensor) else None


class SavingContext:
    """The hooks on saved tensors and the number of dispatch modes at the point where this object is made."""

    def __init__(self) -> None:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._hooks = hooks or (identity, identity)
        self._modes = len(_get_current_dispatch_mode_stack())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context with the hooks and modes of the point where this object was made, for code inside of that point."""
        inner = []
        while len(_get_current_dispatch_mode_stack()) > self._modes:
            inner.append(_pop_mode())
        try:
            with saved_tensors_hooks(*self._hooks):
                yield
        finally:
            for mode in reversed(inner):
                _push_mode(mode)
