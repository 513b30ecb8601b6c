"""The parameter groups of an optimizer over pipeline stages, of which one may have fewer: without experts, or frozen.

DeepSpeed's ZeRO 1 and 2 (0.19.8 runtime/zero/stage_1_and_2.py, scaled_global_norm) reduce the norm of each group over
the pipeline ranks: a stage with fewer groups takes part in the norms of the others' groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method


def keep_own_parameters(given: dict[str, Any], model: nn.Module) -> None:
    """Leave, of the optimizer and the parameters that deepspeed.initialize was ``given``, those in ``model``.

    Raises ValueError for a group of parameters that all stand in other stages.
    """
    own = {id(each) for each in model.parameters()}
    optimizer = given.get("optimizer")
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = _own(group["params"], own)
    parameters = given.get("model_parameters")
    if parameters is not None:
        held = list(parameters)
        if held and isinstance(held[0], dict):
            given["model_parameters"] = [{**group, "params": _own(list(group["params"]), own)} for group in held]
        elif held:
            named = isinstance(held[0], tuple)
            given["model_parameters"] = [each for each in held if id(each[1] if named else each) in own]


def give_no_parameters(given: dict[str, Any]) -> None:
    """Make the optimizer that deepspeed.initialize was ``given``, or will make, one without parameters."""
    optimizer = given.get("optimizer")
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = []
    given["model_parameters"] = [{"params": []}]


def _own(parameters: Sequence[nn.Parameter], own: Collection[int]) -> list[nn.Parameter]:
    found = [each for each in parameters if id(each) in own]
    if parameters and not found:
        raise ValueError(
            f"a group of {len(parameters)} parameters of the optimizer has none in this rank's pipeline stages, and "
            "DeepSpeed has no empty groups. What to do: groups with parameters of every stage, another "
            "ds_npu.pipeline.split, or ds_npu.parallel.pipeline 1"
        )
    return found


def agree_on_groups(engine: Any) -> None:
    """Let the stages of ``engine``, which is complete, take the norms of all groups together; all ranks call it.

    Raises ValueError, on all ranks along pp, for an optimizer in 16 bits that takes its norm otherwise.
    """
    topology: Topology = engine.topology
    optimizer = engine.optimizer
    own = 0 if optimizer is None else len(optimizer.param_groups)
    counts = [0] * topology.size("pp")
    dist.all_gather_object(counts, own, group=topology.group("pp"))
    if len(set(counts)) == 1:
        return
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        _take_norms_of_others(optimizer, max(counts) - own)
    elif not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"ds_npu.parallel.pipeline: {type(optimizer).__name__} has {', '.join(map(str, counts))} parameter groups "
            "in the stages (one without experts has fewer), and would clip by another norm in each. What to do: "
            "zero_optimization.stage 1 or 2 without data_types.grad_accum_dtype, or ds_npu.pipeline.split with "
            "experts in every stage"
        )


def _take_norms_of_others(optimizer: Any, missing: int) -> None:
    """Let ``optimizer`` join in the norms of the ``missing`` groups that other stages have and this one has not."""

    def norm_of_other() -> Any:
        if optimizer.cpu_offload:
            return optimizer.complete_grad_norm_calculation_for_cpu_offload([])
        return optimizer.get_grad_norm_direct([], [])

    def scaled_global_norm(norm_of_own: Callable[[float], Any], norm_type: float = 2) -> torch.Tensor:
        found = [norm_of_own(norm_type), *(norm_of_other() for _ in range(missing))]
        norms = torch.stack([torch.as_tensor(each, dtype=torch.float32, device=optimizer.device) for each in found])
        # DeepSpeed says -1 for a norm that is not finite.
        return torch.where((norms < 0).any(), -torch.ones_like(norms[0]), torch.linalg.vector_norm(norms))

    if missing:
        wrap_method(optimizer, "scaled_global_norm", scaled_global_norm, MethodLevel.CORRECTION)


NOTHING_TRAINED = (
    "ds_npu.parallel.pipeline: nothing is trained in the stages of pipeline ranks {}, and DeepSpeed's ZeRO and its "
    "optimizers in 16 bits have no empty groups. What to do: ds_npu.pipeline.split with a weight that is trained in "
    "the stages of every rank; or zero_optimization.stage 0 in float32, where such a stage trains nothing"
)


def give_own_parameters(given: dict[str, Any], model: nn.Module, topology: Topology) -> None:
    """Leave, of what deepspeed.initialize was ``given``, the parameters in ``model``; all ranks along pp call it.

    Raises ValueError, on all of them, where nothing is trained in the stages of a rank and the optimizer needs some
    weights, and for a group of parameters that all stand in other stages.
    """
    config = given["config_class"]
    in_16_bits = config.bfloat16_config.enabled or config.float16_config.enabled
    every = [False] * topology.size("pp")
    own = any(each.requires_grad for each in model.parameters())
    dist.all_gather_object(every, own, group=topology.group("pp"))
    without = [rank for rank, trains in enumerate(every) if not trains]
    needs_weights = in_16_bits or config.zero_optimization_stage > 0
    if without and needs_weights and len(without) < len(every):
        raise ValueError(NOTHING_TRAINED.format(", ".join(map(str, without))))
    if own:
        keep_own_parameters(given, model)
    else:
        give_no_parameters(given)
