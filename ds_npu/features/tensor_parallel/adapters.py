"""LoRA adapters (arXiv 2106.09685; PEFT) of layers that are sharded over the tensor ranks.

An adapter adds B A x to the output of its layer for x; A is [r, K], B is [N, r], for K inputs and N outputs:

    adapted layer         A                                         B
    a column linear       whole; its r outputs enter the region   sharded as the layer, along its outputs
    a latent projection   whole; its r outputs enter the region     whole, in the region
    a row linear        sharded as the layer, along its inputs      whole, outside of the region
    an embedding          whole, outside of regions                 whole, outside of regions

So r more numbers of each token enter and leave a region, and dropout before A is dropout outside of the region.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from ds_npu.comm.crossing import copy
from ds_npu.config.roles import Role
from ds_npu.features.tensor_parallel.role_shards import ROW_ROLES, RoleShards
from ds_npu.models import names
from ds_npu.models.attributes import attribute, set_attribute
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.runtime.forward_wraps import Level, wrap_forward
from ds_npu.parallel.tensor.axis import TensorAxis
from ds_npu.parallel.tensor.region import RandomNumbers, RegionInput

TensorForward = Callable[[torch.Tensor], torch.Tensor]

DROPOUTS, FACTORS = "lora_dropout", "lora_A"
"""Where PEFT keeps the dropout, and the first factor, of each adapter of a layer."""
FACTOR_ROLES = (Role.LORA_A, Role.LORA_B)
KNOWN = ("peft.tuners.lora.layer.Linear", "peft.tuners.lora.layer.Embedding")
"""Layers with an adapter whose forward is known; others (of quantised weights) compute in other ways."""


def with_adapter(name: str) -> str:
    """The layer that PEFT has put around ``name``, which computes layer and adapter; ``name`` where there is none."""
    layer, _, last = name.rpartition(".")
    return layer if last == names.BASE_LAYER else name


def adapted_layers(plan: ModelPlan) -> list[str]:
    """The layers that have a LoRA adapter and are neither replicated nor experts."""
    layers = dict.fromkeys(plan.adapted(name) for name in plan.named(*FACTOR_ROLES))
    return [each for each in layers if each is not None and plan.roles[each] is not Role.EXPERTS]


def check_adapters(plan: ModelPlan, modules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError that names every adapter that does more than add B A x."""
    problems = []
    for name in adapted_layers(plan):
        layer = modules[with_adapter(name)]
        kind = f"{type(layer).__module__}.{type(layer).__name__}"
        variants = {type(each).__name__ for each in (attribute(layer, "lora_variant", dict) or {}).values()}
        if kind not in KNOWN:
            problems.append(f"{name} ({plan.roles[name]}): {kind} is not known, only {' and '.join(KNOWN)}")
        elif variants:
            problems.append(f"{name} ({plan.roles[name]}): its adapter is the variant {', '.join(sorted(variants))}")
    if problems:
        more = f"\n  and {len(problems) - 8} more like these" if len(problems) > 8 else ""
        listed = "\n  ".join(problems[:8])
        raise ValueError(
            f"adapters that cannot be sharded over tensor ranks:\n  {listed}{more}\n"
            "Use plain LoRA (no variant of it, no quantised weights) for these layers, or ds_npu.parallel.tensor = 1"
        )


def factor_shards_of(plan: ModelPlan, shards: Mapping[str, RoleShards]) -> dict[str, RoleShards]:
    """The shards of factors that are sharded as their layer is: A along its inputs, B along its outputs."""
    found = {}
    for name in plan.named(*FACTOR_ROLES):
        layer = plan.adapted(name)
        if layer is None or layer not in shards or plan.roles[layer] is Role.EMBEDDING:
            continue
        if (plan.roles[name] is Role.LORA_A) == (plan.roles[layer] in ROW_ROLES):
            found[name] = shards[layer]
    return found


def is_at_border(plan: ModelPlan, name: str) -> bool:
    """Whether ``name`` is a factor of a layer in a region and is computed outside of the region."""
    layer = plan.adapted(name)
    if layer is None or plan.roles.get(name) not in FACTOR_ROLES:
        return False
    return plan.roles[name] is Role.LORA_A or plan.roles[layer] in ROW_ROLES


def enter_by_factors(layer: nn.Module, axis: TensorAxis, outside: RandomNumbers) -> None:
    """Run A of each adapter of ``layer``, which begins a region, before the region; its output enters the region.

    ``outside`` gives the random numbers for the dropout before A.
    """
    for name in entered_factors(layer):
        each = layer.get_submodule(name)
        is_factor = name.startswith(f"{FACTORS}.")
        wrap_forward(
            each, partial(_narrow, each, axis) if is_factor else partial(_before_the_region, outside), Level.REGION
        )


def entered_factors(layer: nn.Module) -> list[str]:
    """The names in ``layer``, which has adapters, of the dropout and the factor A of each."""
    return [f"{each}.{name}" for each in (DROPOUTS, FACTORS) for name, _ in layer.get_submodule(each).named_children()]


def _before_the_region(outside: RandomNumbers, forward: TensorForward, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, RegionInput):
        return forward(x)
    with outside():
        changed = forward(x.source)
    return x if changed is x.source else RegionInput.of(changed, x.axis, x.shards)


def enter_by_output(forward: TensorForward, x: torch.Tensor) -> torch.Tensor:
    """Run a first module of a region before the region (on sequence shards); its output enters the region.

    This is for adapters' factors A, and for down-projections of multi-head latent attention (DeepSeek-V2, arXiv
    2405.04434 section 2.1), whose outputs are narrow and go to every tensor rank.
    """
    return RegionInput.of(forward(x.source), x.axis, x.shards).entered() if isinstance(x, RegionInput) else forward(x)


def _narrow(factor: nn.Module, axis: TensorAxis, forward: TensorForward, x: torch.Tensor) -> torch.Tensor:
    """Compute A of ``x``: before the region if the layer begins it, else inside."""
    if isinstance(x, RegionInput):
        return enter_by_output(forward, x)
    # Inside of the region already (behind MLA's norms): this rank's gradient of A is partial. With sequence parallelism
    # the gradient of every whole weight is summed elsewhere.
    weight = factor.get_parameter("weight")
    return functional.linear(x, weight if axis.sequence_parallel else copy(weight, axis.group))


def keep_padding(layer: nn.Module, base: nn.Module) -> None:
    """Fix the padding index of an embedding's adapters, before sharding makes that of ``base`` one of local rows."""
    padding = attribute(base, "padding_idx", int)

    def embed(ids: torch.Tensor, table: torch.Tensor, **_: object) -> torch.Tensor:
        return functional.embedding(ids, table, padding_idx=padding)

    set_attribute(layer, "_embed", embed)
