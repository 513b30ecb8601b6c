"""The gradient norm of experts' weights: under ZeRO 3, and in 16 bits without ZeRO.

ZeRO 3 shards each weight over the ranks that hold copies of it (edp). DeepSpeed adds up the squares over these ranks
and the tensor ranks (0.19.8 runtime/zero/stage3.py, get_grad_norm_direct and
complete_grad_norm_calculation_for_cpu_offload); the ranks that hold other experts are the whole expert view. Under
ZeRO 1 and 2 its sum is over all data and tensor ranks, each of which has another piece. In 16 bits without ZeRO, and
in its BF16_Optimizer, DeepSpeed adds up the squares over the ranks of the expert view, but for FP16_UnfusedOptimizer
(``gradient_norm``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method

Parameters = Sequence[torch.nn.Parameter]


def count_on_every_rank(optimizer: Any) -> None:
    """Make ``optimizer``, a BF16_Optimizer, take its norm where a rank counts no dense gradient, too.

    Tensor ranks but the first do not count what all of them hold alike; where they hold nothing else, as with experts
    in a model that is otherwise whole, DeepSpeed stacks an empty list (0.19.8 runtime/utils.py:956).
    """

    def get_grads_for_norm(grads_for_norm: Callable[[bool], Any], for_clipping: bool = False) -> Any:
        found = grads_for_norm(for_clipping)
        if for_clipping:
            return found
        dense, experts = found
        return dense or [optimizer.fp32_groups_gradients[0][0].new_zeros(1)], experts

    wrap_method(optimizer, "get_grads_for_norm", get_grads_for_norm, MethodLevel.CORRECTION)


def add_up_experts(optimizer: Any, topology: Topology) -> None:
    """Make ``optimizer``, a DeepSpeedZeroOptimizer_Stage3, add the squares of experts over all ranks that hold some."""
    experts, tensor_ranks = topology.group("ep", "etp"), optimizer.model_parallel_group

    @contextmanager
    def model_ranks_of(params: Parameters) -> Iterator[None]:
        # The marks of experts make every rank count.
        optimizer.model_parallel_group = experts if params and placement_of(params[0]).is_expert else tensor_ranks
        try:
            yield
        finally:
            optimizer.model_parallel_group = tensor_ranks

    def norm_of(
        direct: Callable[..., Any], gradients: Sequence[torch.Tensor], params: Parameters, norm_type: float = 2
    ) -> Any:
        with model_ranks_of(params):
            return direct(gradients, params, norm_type)

    def norm_of_offloaded(complete: Callable[[Parameters], Any], params: Parameters) -> Any:
        with model_ranks_of(params):
            return complete(params)

    wrap_method(optimizer, "get_grad_norm_direct", norm_of, MethodLevel.CORRECTION)
    name = "complete_grad_norm_calculation_for_cpu_offload"
    wrap_method(optimizer, name, norm_of_offloaded, MethodLevel.CORRECTION)
