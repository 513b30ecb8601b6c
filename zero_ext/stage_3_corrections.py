"""Corrections of DeepSpeed's ZeRO 3: averages and norms of gradients, when weights are gathered, what is let go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import sort_dtypes
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partition_parameters import register_external_parameter
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn

from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.method_wraps import MethodLevel, replace_method, without_nvtx, wrap_method

REDUCE_SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
ALL_REDUCE = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads"
REDUCE = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
RELEASED = "_PartitionedParameterCoordinator__params_to_release"
GATHERS = "_DeepSpeedZeRoOffload__allgather_stream"

Parameters = Sequence[nn.Parameter]
Partitions = list[torch.Tensor]
Reduce = Callable[..., Partitions]


def average_over_data_ranks(optimizer: Any, topology: Topology) -> None:
    """Make ``optimizer``'s reductions divide by dp. Changes this instance only, and only where it divides otherwise.

    Gradients are summed over all ranks that see other tokens and divided by dp: context peers return shares of a loss
    that add up to it, and the tokens of an expert come from all ranks of its expert-parallel group.
    ``__avg_scatter_grads`` divides by the size of the group that shards the parameter (through
    ``reduce_scatter_coalesced``), and its all-reduce twin divides by that size / cp (DeepSpeed 0.19.8
    runtime/zero/stage3.py:1912, :1862; upstream issues 5555, 6841).
    """
    dp = topology.size("dp")
    cp = topology.size("cp")
    has_experts = topology.size("ep", "etp") > 1
    wrong = {REDUCE_SCATTER: cp > 1 or has_experts, ALL_REDUCE: has_experts}
    if not any(wrong.values()):
        return

    def sharding_ranks(parameter: nn.Parameter) -> int:
        return topology.size(*placement_of(parameter).data_axes)

    def reduce_scattered(reduce: Reduce, params: list[nn.Parameter], dtype: torch.dtype) -> Partitions:
        return _scaled(reduce(params, dtype), sharding_ranks(params[0]) / dp)

    def all_reduced(reduce: Reduce, gradients: torch.Tensor, dtype: torch.dtype) -> Partitions:
        params = optimizer.ipg_buckets[dtype].params
        return _scaled(reduce(gradients, dtype), sharding_ranks(params[0]) / (dp * cp))

    for name, corrected in ((REDUCE_SCATTER, reduce_scattered), (ALL_REDUCE, all_reduced)):
        if wrong[name]:
            wrap_method(optimizer, name, corrected, MethodLevel.CORRECTION)


def _scaled(partitions: Partitions, factor: float) -> Partitions:
    return partitions if factor == 1 else [partition.mul_(factor) for partition in partitions]


def add_up_experts(optimizer: Any, topology: Topology) -> None:
    """Make ``optimizer``, a DeepSpeedZeroOptimizer_Stage3, add the squares of experts over all ranks that hold some.

    ZeRO 3 shards each weight over the ranks that hold copies of it (edp). DeepSpeed adds up the squares over these
    ranks and the tensor ranks (0.19.8 runtime/zero/stage3.py, get_grad_norm_direct and
    complete_grad_norm_calculation_for_cpu_offload); the ranks that hold other experts are the whole expert view.
    """
    experts = topology.group("ep", "etp")
    tensor_ranks = optimizer.model_parallel_group

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


def gather_after_steps(optimizer: Any) -> None:
    """Let the stream that gathers the parameters of ``optimizer``, ZeRO 3's, wait for each of its steps, on the device.

    With ``overlap_comm``, the default, DeepSpeed (0.19.8 runtime/zero/partitioned_param_coordinator.py:400) gathers on
    a stream that waits for nothing: where the host runs ahead (a script that reads no loss between two steps), the
    first gathers of a forward may read parameters that the optimizer is still to write, and the forward computes with
    old ones. Seen on simulated NPUs, whose losses then differed from run to run.

    Changes this instance only. Raises RuntimeError where the stream does not exist.
    """
    offload = optimizer.parameter_offload
    if not hasattr(offload, GATHERS):
        raise RuntimeError(
            f"{type(offload).__name__} has no {GATHERS}: this DeepSpeed gathers parameters in another way. What to do: "
            "zero_optimization.overlap_comm false, and tell the authors of ds_npu the version"
        )
    stream = getattr(offload, GATHERS)
    if stream is None:
        return

    def stepped(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        done = step(*args, **kwargs)
        stream.wait_stream(get_accelerator().current_stream())
        return done

    wrap_method(optimizer, "step", stepped, MethodLevel.CORRECTION)


def let_go_when_destroyed(optimizer: Any) -> None:
    """Let Python collect ``optimizer``, ZeRO 3's, and its engine and weights, when the engine has been destroyed.

    DeepSpeed (0.19.8) keeps them: a list of the modules whose forward runs (runtime/zero/parameter_offload.py:315)
    begins with the model of every engine, and keeps the modules of a forward that has raised; a method's cache
    (runtime/zero/partitioned_param_coordinator.py:633) has modules as keys.
    """
    modules = set(optimizer.parameter_offload.module.modules())
    released: Any = without_nvtx(getattr(PartitionedParameterCoordinator, RELEASED))

    def destroyed(destroy: Callable[[], None]) -> None:
        destroy()
        FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if module not in modules]
        released.cache_clear()

    wrap_method(optimizer, "destroy", destroyed, MethodLevel.CORRECTION)


def reduce_behind_the_next_forward(optimizer: Any, behind_waits: Callable[[], None]) -> None:
    """Let ``optimizer``, ZeRO 3's, reduce the last gradients of a micro-batch during the next forward, on the device.

    DeepSpeed's host waits for them at the end of each backward (0.19.8 runtime/zero/stage3.py:1414), so that the device
    has nothing to compute meanwhile. Here the computing stream waits at the end of the last micro-batch, and before
    a step, and calls ``behind_waits``; what reads gradients between (safe_get_full_grad) waits by itself. Changes this
    instance only; on the CPU, where there are no streams, nothing.
    """
    stream = optimizer.reduce_and_partition_stream
    if stream is None or type(optimizer) is not DeepSpeedZeroOptimizer_Stage3 or optimizer.offload_optimizer:
        return

    def wait() -> None:
        get_accelerator().current_stream().wait_stream(stream)
        behind_waits()

    def end_backward() -> None:
        for dtype in sort_dtypes(optimizer.ipg_buckets):
            getattr(optimizer, REDUCE)(dtype)
        if optimizer.is_gradient_accumulation_boundary():
            wait()
        optimizer.params_already_reduced = dict.fromkeys(optimizer.params_already_reduced, False)
        partitions = getattr(optimizer, PARTITIONS)
        for index, weights in enumerate(optimizer.fp16_groups):
            optimizer.averaged_gradients[index] = [
                partitions[weight.ds_id] if weight.requires_grad else torch.zeros_like(weight.ds_tensor)
                for weight in weights
            ]
        optimizer._epilogue_ran_this_backward = True

    def stepped(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        wait()
        return step(*args, **kwargs)

    replace_method(optimizer, "independent_gradient_partition_epilogue", end_backward, MethodLevel.CORRECTION)
    wrap_method(optimizer, "step", stepped, MethodLevel.BUCKETS)


@contextmanager
def gathered_as_one(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While ZeRO-3 adds its hooks to a model, present ``modules`` as if they held their inner modules' weights.

    So all weights of a module are gathered together, where its inner modules use one another's. DeepSpeed's own way,
    leaf modules (deepspeed/utils/z3_leaf_module.py), reduces gradients in a full backward hook. For a module whose
    tensors are all keyword arguments, as transformers calls its attention, that hook runs before the module's gradients
    exist (DeepSpeed 0.19.8 runtime/zero/stage3.py:1534), and they would be dropped.
    """
    whole = list(modules)
    for module in whole:
        for parameter in module.parameters():
            register_external_parameter(module, parameter)
        module.__dict__["children"] = lambda: iter(())
    try:
        yield
    finally:
        for module in whole:
            del module.__dict__["children"]
