"""Gated MLPs of a model: SiLU and product in one kernel."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.fused_ops.equivalence import (
    computes_the_same,
    forward_of_copy,
    isolated_on_cpu,
    own_forward,
    random,
)
from ds_npu.features.fused_ops.fusion_result import FusionResult
from ds_npu.models.plan import ModelPlan
from ds_npu.ops.swiglu import swiglu
from ds_npu.parallel.forward_wraps import replace_innermost_forward
from ds_npu.parallel.tensor.linear import stacked_outputs

K, N = 6, 10
"""Sizes of the MLPs that are probed."""


def fuse_mlps(model: nn.Module, plan: ModelPlan) -> Iterator[FusionResult]:
    """Put ``ops.swiglu`` into every MLP, and all experts, of ``plan`` that are shown to compute it."""
    for name in plan.named(Role.MLP):
        yield FusionResult(name, _fuse(model.get_submodule(name), _linears(plan, name)) or "")
    for name in plan.named(Role.EXPERTS):
        yield FusionResult(name, _fuse_experts(model.get_submodule(name)) or "")


def _linears(plan: ModelPlan, mlp: str) -> dict[Role, str]:
    """The attribute of each linear of ``mlp``; where PEFT has put an adapter around one, that of the whole."""
    roles = (Role.GATE, Role.UP, Role.GATE_UP, Role.DOWN)
    return {plan.roles[name]: name[len(mlp) :].lstrip(".").split(".")[0] for name in plan.inside(mlp, *roles)}


def _fuse(module: nn.Module, linears: dict[Role, str]) -> str | None:
    """Why ``module`` was left as it is."""
    if set(linears) == {Role.GATE, Role.UP, Role.DOWN}:
        gate, up, down = linears[Role.GATE], linears[Role.UP], linears[Role.DOWN]
        ours = functools.partial(of_two, module, gate, up, down)
        sizes = {gate: (K, N), up: (K, N), down: (N, K)}
    elif set(linears) == {Role.GATE_UP, Role.DOWN}:
        gate_up, down = linears[Role.GATE_UP], linears[Role.DOWN]
        ours = functools.partial(of_one, module, gate_up, down)
        sizes = {gate_up: (K, 2 * N), down: (N, K)}
    else:
        return "it has no gate"
    if reason := own_forward(module):
        return reason
    with isolated_on_cpu() as generator:
        small: dict[str, nn.Module] = {name: nn.Linear(*size).double() for name, size in sizes.items()}
        theirs = forward_of_copy(module, {}, small)
        mine = functools.partial(ours.func, theirs.__self__, *ours.args[1:])  # type: ignore[attr-defined]
        if not computes_the_same(theirs, mine, random(generator, 2, 3, K)):
            return f"{type(module).__name__} computes something else than SwiGLU"
    replace_innermost_forward(module, ours)
    return None


def of_two(module: nn.Module, gate: str, up: str, down: str, x: torch.Tensor) -> Any:
    """down(silu(gate(x)) * up(x)) of two linears, whose outputs stand one behind the other in one tensor [2, B, S, I].

    Parallel linears write it themselves. Of others it is a copy, which is what the kernel costs there.
    """
    inside = dict(module.named_children())
    return inside[down](swiglu(stacked_outputs((inside[gate], inside[up]), x), 0).squeeze(0))


def of_one(module: nn.Module, gate_up: str, down: str, x: torch.Tensor) -> Any:
    """down(silu(gate) * up) of one linear, whose outputs are all gates, then all ups."""
    inside = dict(module.named_children())
    return inside[down](swiglu(inside[gate_up](x)))


GATE_METHOD = "_apply_gate"
"""What transformers' grouped and batched products of experts call between them (transformers 5, integrations.moe)."""


def _fuse_experts(module: nn.Module) -> str | None:
    """Why the experts ``module`` were left as they are."""
    methods = {name: method for kind in reversed(type(module).__mro__) for name, method in vars(kind).items()}
    config: Any = vars(module).get("config")
    if GATE_METHOD not in methods or config is None:
        return f"{type(module).__name__} is no module of experts that transformers chooses an implementation for"
    if config._experts_implementation in (None, "eager"):
        return (
            "each expert is computed by itself: choose set_experts_implementation('grouped_mm') or 'batched_mm', "
            "which compute all at once"
        )
    with isolated_on_cpu() as generator:
        if not computes_the_same(functools.partial(methods[GATE_METHOD], module), swiglu, random(generator, 3, 2 * N)):
            return f"{type(module).__name__} computes something else than SwiGLU"
    vars(module)[GATE_METHOD] = swiglu
    return None
