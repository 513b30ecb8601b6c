"""Gradients of weights that are whole on every tensor rank, where each rank sees a part of the weight's inputs.

In Megatron sequence parallelism (arXiv:2205.05198) norms, and biases between regions, see one sequence shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_npu.comm.collectives import all_reduce
from ds_npu.parallel.runtime.placement import mark_partial


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
