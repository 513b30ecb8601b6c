"""Weight gradients that the matrix product itself adds to the buffer in which the optimizer accumulates them.

Megatron-LM calls this gradient accumulation fusion.

[Note: None for a gradient] A linear layer that has added its weight's gradient gives autograd None for it. The weight's
AccumulateGrad node is executed all the same, once in a backward and after every use of the weight, and so are the
weight's post-accumulate hooks, by which DeepSpeed learns that a gradient is complete. A use that went the ordinary way
(a tied embedding) ends in ``weight.grad``, as ever, from where DeepSpeed adds it to the same buffer. PyTorch 2.13 runs
the hooks after None too; where a PyTorch does not, they are run behind the node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ds_npu.ops.autograd import Context, applied
from ds_npu.ops.matmul_accumulate import matmul_accumulate_
from ds_npu.parallel.tensor.tensor_attribute import TensorAttribute

WIDE = (torch.float32, torch.float64)

Hook = Callable[[torch.Tensor], None]

Buffer = Callable[[torch.dtype], torch.Tensor | None]
"""From the dtype of a product's operands to the tensor, in the weight's shape, to which the product is added; None
where it is not added."""


class GradientBuffer:
    """The attribute of a weight whose gradient the matrix product adds to a buffer."""

    def __init__(self, weight: nn.Parameter, buffer: Buffer) -> None:
        self._weight, self._buffer = weight, buffer
        self._hooks_run = hooks_run_after_none()
        self._backward = -1
        GRADIENT_BUFFER.set(weight, self)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # A weight read from a file has no buffer.

    def add(self, dy: torch.Tensor, x: torch.Tensor) -> bool:
        """Add dyᵀ x of [T, rows] and [T, columns] in the buffer's precision, within a backward.

        False, and nothing is added, where autograd is to have the gradient: for hooks that change it (those that sum it
        over ranks), for gradients of gradients, and for torch.autograd.grad.
        """
        node = get_gradient_edge(self._weight).node
        if torch.is_grad_enabled() or self._weight._backward_hooks or not _accumulates(node):
            return False
        buffer = self._buffer(dy.dtype)
        if buffer is None or buffer.dtype not in (*WIDE, dy.dtype):
            return False
        accumulate(buffer, dy, x)
        if not self._hooks_run:
            self._run_hooks_after(node)
        return True

    def _run_hooks_after(self, node: Node) -> None:
        if self._backward == (task := torch._C._current_graph_task_id()):
            return
        self._backward = task

        def after(_: object, gradients: tuple[torch.Tensor | None]) -> None:
            handle.remove()
            hooks: dict[int, Hook] = self._weight._post_accumulate_grad_hooks or {}
            for hook in list(hooks.values()) if gradients[0] is None else ():
                hook(self._weight)

        # The graph keeps the node for this backward. It keeps the weight alive, so the weight does not keep it.
        handle = node.register_hook(after)


GRADIENT_BUFFER = TensorAttribute[GradientBuffer]("ds_npu_gradient_buffer")


def gradient_buffer(weight: torch.Tensor) -> GradientBuffer | None:
    """The buffer of ``weight``, or of the weight it was cast from; None where it has an ordinary gradient."""
    return GRADIENT_BUFFER.get(weight)


def weight_gradient(buffer: GradientBuffer | None, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """dyᵀ x of [T, rows] and [T, columns]; None where it was added to ``buffer``."""
    return None if buffer is not None and buffer.add(dy, x) else dy.t() @ x


def accumulate(buffer: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """buffer [rows, columns] += dyᵀ x, without a tensor of the buffer's size beside it."""
    if buffer.dtype in WIDE:
        matmul_accumulate_(buffer, dy, x)
    else:
        buffer.addmm_(dy.t(), x)


def _accumulates(node: Node) -> bool:
    """Whether this backward executes ``node``, an AccumulateGrad."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # Inside torch.autograd.grad, which hands the gradient out.
        return False


class _GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Context, *dys: torch.Tensor) -> None:
        return None


@functools.cache
def hooks_run_after_none() -> bool:
    """Whether this PyTorch runs post-accumulate hooks of a leaf whose gradient is None. [Note: None for a gradient]"""
    ran: list[torch.Tensor] = []
    with torch.enable_grad():
        leaf = torch.zeros(1, device="cpu", requires_grad=True)
        register: Callable[[Hook], RemovableHandle] = leaf.register_post_accumulate_grad_hook
        register(ran.append)
        torch.autograd.backward(applied(_GivesNone, _GivesNone.forward)(leaf))
    return bool(ran)
