"""The RMS norms of a model, each in one kernel."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator

import torch
from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.fused_ops.fusion_result import FusionResult, computed_by
from ds_npu.features.modules.equivalence import likeness
from ds_npu.features.modules.rms_norms import rms_norm_arguments
from ds_npu.models.plan import ModelPlan
from ds_npu.ops.layers import rms_norm

NORMS = (Role.NORM, Role.FINAL_NORM, Role.HEAD_NORM)


def fuse_norms(model: nn.Module, plan: ModelPlan) -> Iterator[FusionResult]:
    """Yield for each norm of ``plan`` the change to ``ops.rms_norm``, or why there is none."""
    compared: dict[Hashable, tuple[float, float, bool] | str] = {}
    for name in plan.named(*NORMS):
        module = model.get_submodule(name)
        like = likeness(module)
        found = compared[like] if like in compared else compared.setdefault(like, rms_norm_arguments(module))
        if isinstance(found, str):
            yield FusionResult(name, found)
        else:
            yield computed_by("rms_norm", module, name, functools.partial(norm_forward, module, *found))


def norm_forward(module: nn.Module, eps: float, offset: float, widens: bool, x: torch.Tensor) -> torch.Tensor:
    """The norm of x [..., H], in x's dtype; in that of the weight if it is wider and ``widens``."""
    weight = module.get_parameter("weight")
    return rms_norm(x.to(torch.promote_types(x.dtype, weight.dtype)) if widens else x, weight, eps, offset)
