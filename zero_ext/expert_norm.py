"""The gradient norm of experts' weights under ZeRO 3, which shards each over the ranks that hold copies of it (edp).

DeepSpeed adds up the squares over these ranks and the tensor ranks (0.19.8 runtime/zero/stage3.py,
get_grad_norm_direct and complete_grad_norm_calculation_for_cpu_offload); the ranks that hold other experts are the
whole expert view. Under ZeRO 1 and 2 its sum is over all data and tensor ranks, each of which has another piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ds_npu.parallel.placement import placement_of
from ds_npu.topology.topology import Topology

Parameters = Sequence[torch.nn.Parameter]


def add_up_experts(optimizer: Any, topology: Topology) -> None:
    """Make ``optimizer``, a DeepSpeedZeroOptimizer_Stage3, add the squares of experts over all ranks that hold some."""
    norm_of, norm_of_offloaded = (
        optimizer.get_grad_norm_direct,
        optimizer.complete_grad_norm_calculation_for_cpu_offload,
    )
    experts, tensor_ranks = topology.group("ep", "etp"), optimizer.model_parallel_group

    @contextmanager
    def model_ranks_of(params: Parameters) -> Iterator[None]:
        # The marks of experts make every rank count.
        optimizer.model_parallel_group = experts if params and placement_of(params[0]).is_expert else tensor_ranks
        try:
            yield
        finally:
            optimizer.model_parallel_group = tensor_ranks

    def get_grad_norm_direct(gradients: Sequence[torch.Tensor], params: Parameters, norm_type: float = 2) -> Any:
        with model_ranks_of(params):
            return norm_of(gradients, params, norm_type)

    def complete_grad_norm_calculation_for_cpu_offload(params: Parameters) -> Any:
        with model_ranks_of(params):
            return norm_of_offloaded(params)

    optimizer.get_grad_norm_direct = get_grad_norm_direct
    optimizer.complete_grad_norm_calculation_for_cpu_offload = complete_grad_norm_calculation_for_cpu_offload
