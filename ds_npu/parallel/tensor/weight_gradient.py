"""Sinks for the products of weight gradients: autograd, the optimizer's buffer, or a queue.

The layers of a weight with a ``GradientSink`` give it each product in backward; a weight without one has ordinary
gradients. The sink adds the product to the buffer in which the optimizer accumulates
(Megatron-LM: gradient accumulation fusion), leaves it in a ``GradientQueue`` (zero-bubble pipelines compute it later,
arXiv:2401.10241), or returns it for autograd.

[Note: None for a gradient] A layer whose product was taken gives autograd None for it. The weight's AccumulateGrad node
is executed all the same, once in a backward and after every use of the weight, and so are the weight's post-accumulate
hooks, by which DeepSpeed learns that a gradient is complete. The gradient of an ordinary use (functional.linear in a
user's code) goes to ``weight.grad``, from where DeepSpeed adds it to the same buffer. PyTorch 2.13 runs the hooks
after None too; for a PyTorch that does not, the sink runs them after the node. While products are queued, the hooks
that reduce gradients do nothing (``ds_npu.zero_ext.held_reduction``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ds_npu.comm.collectives import all_reduce
from ds_npu.ops.autograd import Context, applied
from ds_npu.parallel.runtime.placement import mark_partial
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute
from ds_npu.parallel.tensor.product import WeightProduct


@dataclass(frozen=True)
class PartialSum:
    """A hook on a parameter that sums its gradient over ``group``; it is linear, so it may sum parts one by one."""

    group: dist.ProcessGroup | None

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The sum; None in a backward that has postponed the whole gradient."""
        if gradient is None:
            return None
        # Sum a copy: other code may hold the gradient that autograd passes.
        return all_reduce(gradient.clone(memory_format=torch.contiguous_format), self.group).wait()


def sum_gradient(parameter: nn.Parameter, group: dist.ProcessGroup | None) -> None:
    """Sum every gradient of ``parameter`` over ``group``, the tensor ranks, before ZeRO or an accumulation sees it."""
    mark_partial(parameter, "tp")
    register: Callable[[PartialSum], RemovableHandle] = parameter.register_hook
    # A frozen parameter may be trained later; torch registers hooks only on trained ones, and then keeps them.
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    register(PartialSum(group))
    parameter.requires_grad_(trained)


Hook = Callable[[torch.Tensor], None]

Buffer = Callable[[torch.dtype], torch.Tensor | None]
"""A function from the dtype of a product to the tensor, in the weight's shape, in which the optimizer accumulates;
None where it has none yet: it will use ``weight.grad``."""


class GradientSink:
    """The attribute of a weight that takes the products of its gradient.

    With ``direct``, the matrix multiplication itself adds products to the ``buffer``; else only products from the
    ``queue`` are added to it. Where there is no buffer yet, it writes the first product to the ``home``, a function
    from a dtype to memory that becomes ``weight.grad``.
    """

    def __init__(
        self, weight: nn.Parameter, buffer: Buffer, direct: bool = True, home: Buffer = lambda dtype: None
    ) -> None:
        self.weight, self.buffer, self.direct, self.home = weight, buffer, direct, home
        self.name = ""
        self.queue: GradientQueue | None = None
        self._hooks_run = hooks_run_after_none()
        self._backward = -1
        GRADIENT_SINK.set(weight, self)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # A weight read from a file has no sink.

    def take(self, product: WeightProduct) -> torch.Tensor | None:
        """Take ``product`` within a backward; returns the gradient for autograd, None where the sink has taken it.

        Autograd gets the gradient for gradients of gradients, for torch.autograd.grad, and where hooks change it. The
        hooks of partial sums run when a queued product is computed.
        """
        node = get_gradient_edge(self.weight).node
        if torch.is_grad_enabled() or not _accumulates(node):
            return product.gradient()
        if self.queue is not None and self.queue.is_open and _only_sums(self.weight):
            self.queue.put(self, product)
            return None
        if self.weight._backward_hooks or not self._add(product):
            return product.gradient()
        if not self._hooks_run:
            self._run_hooks_after(node)
        return None

    def accumulate(self, products: Sequence[WeightProduct]) -> None:
        """Compute all ``products`` of one backward and add them where the optimizer accumulates.

        The result is bitwise that of autograd and DeepSpeed in that backward.
        """
        total: torch.Tensor | None = None
        for product in products:
            if self.weight._backward_hooks or not self._add(product):
                gradient = product.gradient().to(self.weight.dtype)
                total = gradient if total is None else total.add_(gradient)
        if total is None:
            return
        for hook in (self.weight._backward_hooks or {}).values():
            changed = hook(total)
            total = total if changed is None else changed
        buffer = self.buffer(total.dtype)
        if buffer is None:
            self.weight.grad = total
        else:
            buffer.add_(total.to(buffer.dtype))

    def _add(self, product: WeightProduct) -> bool:
        if not self.direct:
            return False
        buffer = self.buffer(product.dtype)
        if buffer is not None:
            return product.add_to(buffer)
        home = self.home(product.dtype)
        if home is None or not product.write_to(home):
            return False
        self.weight.grad = home
        return True

    def _run_hooks_after(self, node: Node) -> None:
        if self._backward == (task := torch._C._current_graph_task_id()):
            return
        self._backward = task

        def after(_: object, gradients: tuple[torch.Tensor | None]) -> None:
            handle.remove()
            hooks: dict[int, Hook] = self.weight._post_accumulate_grad_hooks or {}
            for hook in list(hooks.values()) if gradients[0] is None else ():
                hook(self.weight)

        # The graph keeps the node alive for this backward. The weight must not: the node refers to the weight.
        handle = node.register_hook(after)


GRADIENT_SINK = TensorAttribute[GradientSink]("ds_npu_gradient_sink")
gradient_sink = GRADIENT_SINK.get
"""The sink of a weight, or of the weight it was cast from; None where it has an ordinary gradient."""


def taken(sink: GradientSink | None, product: WeightProduct) -> torch.Tensor | None:
    """The gradient that a layer returns to autograd for its weight: None where the ``sink`` has taken the product."""
    return product.gradient() if sink is None else sink.take(product)


class QueuedGradients:
    """The products that one backward left in a queue; they keep their operands until they are computed."""

    def __init__(self, products: dict[GradientSink, list[WeightProduct]]) -> None:
        self._products = products

    @property
    def names(self) -> list[str]:
        """The weights whose products are not computed yet."""
        return [sink.name for sink in self._products]

    @torch.no_grad()
    def compute(self) -> None:
        """Add the products to the gradients, weight by weight; ranks that share partial sums use one order."""
        while self._products:
            sink = next(iter(self._products))
            sink.accumulate(self._products.pop(sink))


class GradientQueue:
    """Products of weight gradients that backwards postpone, while the queue ``is_open``."""

    def __init__(self) -> None:
        self.is_open = False
        self._products: dict[GradientSink, list[WeightProduct]] = {}
        self._collected: list[QueuedGradients] = []

    def put(self, sink: GradientSink, product: WeightProduct) -> None:
        self._products.setdefault(sink, []).append(product)

    def collect(self) -> QueuedGradients:
        """The products of the backward that has ended: all that were queued since the last call."""
        collected = QueuedGradients(self._products)
        self._products = {}
        self._collected = [each for each in (*self._collected, collected) if each.names]
        return collected

    def close(self) -> list[str]:
        """Close the queue and drop its products; returns the names of the weights that had products in it."""
        self.is_open = False
        self.collect()
        names = {name for each in self._collected for name in each.names}
        self._collected = []
        return sorted(names)


def _only_sums(weight: nn.Parameter) -> bool:
    """Whether all hooks that change ``weight``'s gradient are PartialSums.

    These may sum the products of the gradient one by one, at different times.
    """
    return all(isinstance(hook, PartialSum) for hook in (weight._backward_hooks or {}).values())


def _accumulates(node: Node) -> bool:
    """Whether this backward executes ``node``, an AccumulateGrad."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # Inside torch.autograd.grad, which returns the gradient.
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
