"""The expert view in DeepSpeed's engines: experts' weights have groups, reductions and optimizer groups of their own.

DeepSpeed does so only for layers of its own classes (0.19.8 runtime/engine.py:2104, :2330), ds_npu for parameters
whose placement is an expert's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import groups as deepspeed_groups
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ds_npu.engine.checkpoints.expert_checkpoints import ExpertCheckpoints
from ds_npu.engine.checkpoints.reassembly import Overlaid
from ds_npu.engine.clients.refusals import MODEL_AXES
from ds_npu.engine.placements import expert_group_name
from ds_npu.models.attributes import attribute
from ds_npu.parallel.runtime.placement import has_experts, placement_of
from ds_npu.topology.degrees import NAMES, Axis, Degrees
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.gradient_norm import count_on_every_rank, take_joint_norm
from ds_npu.zero_ext.method_wraps import MethodLevel

ParameterGroup = dict[str, Any]
LEGACY = ("fused_adam_legacy", "fused_lamb_legacy")
"""Attributes of DeepSpeed's 16-bit optimizers, true around apex's old optimizers: these take a norm of their own."""


def tell_deepspeed_of_experts(topology: Topology) -> None:
    """Put the groups of the expert view where DeepSpeed looks for its own.

    It makes no group that is there already.
    """
    name = expert_group_name(topology)
    for word, axes in (("EXPERT_PARALLEL", ("ep", "etp")), ("EXPERT_DATA_PARALLEL", ("edp",))):
        getattr(deepspeed_groups, f"_{word}_GROUP")[name] = topology.group(*axes)
        getattr(deepspeed_groups, f"_{word}_GROUP_RANKS")[name] = topology.ranks(*axes)


def check_no_own_experts(model: nn.Module, degrees: Degrees) -> None:
    """Raise ValueError where ``model`` has layers of DeepSpeed's own MoE, and ``degrees`` other axes than data.

    DeepSpeed makes their groups of consecutive ranks (0.19.8 utils/groups.py), whatever the ranks hold: these may be
    tensor or context ranks, which share samples; and a group of ds_npu's expert ranks may have the same name.
    """
    found = next((name for name, each in model.named_modules() if isinstance(each, MoE)), None)
    sizes: dict[Axis, int] = {axis: degrees.size(axis) for axis in (*MODEL_AXES, "ep", "etp")}
    others = ", ".join(f"{NAMES[axis]} {size}" for axis, size in sizes.items() if size > 1)
    if found is not None and others:
        raise ValueError(
            f"ds_npu.parallel: found {others} for a model with {found} (deepspeed.moe.layer.MoE), which DeepSpeed "
            "puts on ranks itself (its ep_size), right beside data ranks only. What to do: leave these keys out; or a "
            "module of experts that ds_npu places (docs/experts.md), with ds_npu.parallel.expert"
        )


class SeparateGroups:
    """The parameter groups of an optimizer; experts' weights have groups of their own, with the settings of the old.

    DeepSpeed reduces and shards each group over one process group. A user's learning-rate schedule knows the groups
    that the optimizer was made with: it goes on changing these (``schedule``), and ``follow`` copies their settings.
    """

    def __init__(self, topology: Topology) -> None:
        self.marks = {"moe": True, "name": expert_group_name(topology)}
        self._pairs: list[tuple[ParameterGroup, ParameterGroup]] = []

    def separate(self, parameter_groups: Iterable[ParameterGroup]) -> list[ParameterGroup]:
        """Return ``parameter_groups`` without the experts' weights, followed by the groups of these weights."""
        found = list(parameter_groups)
        for group in list(found):
            parameters = list(group["params"])
            experts = [each for each in parameters if placement_of(each).is_expert]
            if not experts:
                continue
            if len(experts) == len(parameters):
                group.update(self.marks)
                continue
            group["params"] = [each for each in parameters if not placement_of(each).is_expert]
            of_experts = {**group, "params": experts, **self.marks}
            found.append(of_experts)
            self._pairs.append((group, of_experts))
        return found

    def separate_in(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.param_groups[:] = self.separate(optimizer.param_groups)
        return optimizer

    def schedule(self, scheduler: Any) -> None:
        """Show ``scheduler``, which was made before the groups were separated, the groups that it was made with."""
        if self._pairs and isinstance(scheduler, LRScheduler):
            separate = [experts for _, experts in self._pairs]
            known = [each for each in scheduler.optimizer.param_groups if all(each is not other for other in separate)]
            if len(scheduler.base_lrs) == len(known):
                scheduler.optimizer = Overlaid(scheduler.optimizer, param_groups=known)  # type: ignore[assignment]

    def follow(self) -> None:
        """Give each group of experts the settings that the group it came from has now."""
        for source, experts in self._pairs:
            experts.update({key: value for key, value in source.items() if key not in ("params", *self.marks)})


class ExpertView(ExpertCheckpoints):
    """Changes in an engine whose model has weights on the expert view."""

    expert_groups: SeparateGroups | None = None

    def _configure_distributed_model(self, model: nn.Module) -> None:
        if has_experts(model):
            # DeepSpeed wants a parameter group of experts where this is true.
            self.has_moe_layers = any(
                each.requires_grad and placement_of(each).is_expert for each in model.parameters()
            )
            tell_deepspeed_of_experts(self.topology)
            self.expert_groups = SeparateGroups(self.topology)
        super()._configure_distributed_model(model)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        separate = self.expert_groups
        if separate is not None:
            if client_optimizer is None:
                given = list(model_parameters)
                are_groups = given and isinstance(given[0], dict)
                model_parameters = separate.separate(map(dict, given) if are_groups else [{"params": given}])
            elif isinstance(client_optimizer, torch.optim.Optimizer):
                if self.client_lr_scheduler is None and hasattr(client_optimizer.step, "_wrapped_by_lr_sched"):
                    raise ValueError(
                        "ds_npu.parallel.expert: the optimizer has a learning-rate schedule, which knows no groups of "
                        "experts. What to do: deepspeed.initialize(lr_scheduler=...), or a scheduler in the config"
                    )
                separate.separate_in(client_optimizer)
            else:
                client_optimizer = _separated(client_optimizer, separate)
        super()._configure_optimizer(client_optimizer, model_parameters)
        if separate is not None:
            self.events.before_step(MethodLevel.EXPERT_SETTINGS, separate.follow)
        made: Any = attribute(self, "optimizer", object)
        is_legacy = made is not None and any(attribute(made, each, bool) for each in LEGACY)
        if separate is not None and (
            is_legacy or (isinstance(made, FP16_Optimizer | FP16_UnfusedOptimizer) and self.fp16_enabled())
        ):
            raise ValueError(
                f"ds_npu.parallel.expert: found {self.topology.size('ep')} with {type(made).__name__} in fp16, whose "
                "steps are too small by the loss scale (DeepSpeed 0.19.8 divides gradients by it, and multiplies the "
                "loss by it under ZeRO only), or around an optimizer of apex's older interface. What to do: "
                "zero_optimization.stage 1, 2 or 3, bf16, or float32"
            )
        if isinstance(made, FP16_UnfusedOptimizer) and not is_legacy:
            take_joint_norm(made, self.topology, self.model_axes)
        if isinstance(made, BF16_Optimizer):
            count_on_every_rank(made)

    def _configure_lr_scheduler(self) -> None:
        super()._configure_lr_scheduler()
        if self.expert_groups is not None:
            self.expert_groups.schedule(self.lr_scheduler)

    def _validate_zero3_moe_compatibility(self) -> None:
        """As DeepSpeed's, but not with experts of ds_npu.

        It accepts only layers of its own; ours carry the group over which ZeRO-3 shards them.
        """
        if not self.has_experts:
            super()._validate_zero3_moe_compatibility()

    def _resolve_zero3_param_placement(self) -> None:
        """As DeepSpeed's, but not with experts: it would shard every parameter over the data ranks."""
        if not self.has_experts:
            super()._resolve_zero3_param_placement()


def _separated(make: Callable[[Any], torch.optim.Optimizer], groups: SeparateGroups) -> Callable[[Any], Any]:
    return lambda parameters: groups.separate_in(make(parameters))
