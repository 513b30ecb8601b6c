"""Models that cannot be sharded over tensor ranks, and calls that a sharded model refuses."""

from __future__ import annotations

import inspect

from torch import nn

from ds_npu.config.roles import PARENT, Role
from ds_npu.models import kinds, names
from ds_npu.models.attributes import attribute, has_attribute
from ds_npu.models.hugging_face_model import config_of
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.tensor.axis import TensorAxis

SHARDED_IN_REGIONS = (
    *(role for role, parent in PARENT.items() if parent in (Role.ATTENTION, Role.MLP)),
    Role.EXPERTS,
    Role.COLUMN,
    Role.ROW,
)
SHARDED_ROLES = (*SHARDED_IN_REGIONS, Role.EMBEDDING, Role.HEAD)
BIASES = {"alibi", "position_bias"}
"""Arguments of attentions in transformers that are biases of the scores of all heads."""


def check_shardable(model: nn.Module, plan: ModelPlan, axis: TensorAxis) -> None:
    """Raise ValueError for regions that cannot be sharded.

    They hold a module, or take an argument, that needs all heads or columns; or, with sequence parallelism, they stand
    outside of blocks.
    """
    sharded = {name: role for name, role in plan.roles.items() if role in SHARDED_ROLES}
    _check_regions(model, plan)
    outside = [
        f"{name} ({role})" for name, role in sharded.items() if role in SHARDED_IN_REGIONS and plan.block(name) is None
    ]
    if axis.sequence_parallel and outside:
        more = " ..." if len(outside) > 4 else ""
        raise ValueError(
            "ds_npu.parallel.sequence_parallel: found true; outside of blocks, where sequences are whole, "
            f"{plan.model} shards {', '.join(outside[:4])}{more}. What to do: false, or give the modules around them "
            "the role block in ds_npu.plan"
        )


def _check_regions(model: nn.Module, plan: ModelPlan) -> None:
    """Raise ValueError for regions that hold a module, or take an argument, that needs all heads or columns."""
    for name in plan.named(Role.REPLICATED):
        region, module = plan.around(name, Role.ATTENTION, Role.MLP), model.get_submodule(name)
        if region is not None and not kinds.is_norm(module):
            raise ValueError(
                f"{plan.model}: {name} is {Role.REPLICATED} and stands in {region}, whose role is "
                f"{plan.roles[region]}, where each tensor rank has heads or columns of its own. What to do: give "
                f"{names.generic(region)} the role {Role.REPLICATED} in ds_npu.plan, which holds for all in it"
            )
    for name in plan.named(Role.ATTENTION):
        module = model.get_submodule(name)
        settings = config_of(module) or config_of(model) or module
        has_alibi = attribute(settings, "alibi", object) if has_attribute(settings, "alibi") else True
        biased = BIASES & inspect.signature(module.forward).parameters.keys()
        if biased and has_alibi:
            raise ValueError(
                f"{plan.model}: {name} is given {min(biased)}, a bias of the scores of all heads (ALiBi), of which "
                "each tensor rank would need that of its own heads. What to do: ds_npu.parallel.tensor = 1, or give "
                f"{names.generic(name)} the role {Role.REPLICATED} in ds_npu.plan"
            )
