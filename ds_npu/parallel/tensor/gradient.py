"""Gradients of weights that are whole on every tensor rank, where each rank sees a part of the weight's inputs.

In Megatron sequence parallelism (arXiv:2205.05198) norms, and biases between regions, see one sequence shard.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_npu.comm.collectives import all_reduce
from ds_npu.parallel.placement import mark_partial


def sum_gradient(parameter: nn.Parameter, group: dist.ProcessGroup | None) -> None:
    """Sum every gradient of ``parameter`` over ``group``, the tensor ranks, before ZeRO or an accumulation sees it."""
    mark_partial(parameter, "tp")
    register: Callable[[Callable[[torch.Tensor], torch.Tensor]], RemovableHandle] = parameter.register_hook
    # A frozen one may be trained later on; torch registers hooks only on what is trained, and then keeps them.
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    # The sum is of a copy: somebody else may hold the gradient that autograd hands out.
    register(lambda gradient: all_reduce(gradient.clone(memory_format=torch.contiguous_format), group).wait())
    parameter.requires_grad_(trained)
