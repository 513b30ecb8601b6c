"""The gated MLPs and experts of a model: SwiGLU (arXiv 2002.05202), SiLU and product, in one kernel."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping

import torch
from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.declaration import Change
from ds_npu.features.fused_ops.fusion_result import FusionResult, computed_by
from ds_npu.features.modules.equivalence import (
    computes_the_same,
    forward_of_copy,
    isolated_on_cpu,
    likeness,
    own_forward,
    random_input,
)
from ds_npu.models.attributes import set_attribute
from ds_npu.models.hugging_face_model import config_of
from ds_npu.models.plan import ModelPlan
from ds_npu.ops.layers import swiglu
from ds_npu.parallel.tensor.linear import stacked_outputs

K, N = 6, 10
"""Inputs and columns of the MLPs that are compared."""


def fuse_mlps(model: nn.Module, plan: ModelPlan) -> Iterator[FusionResult]:
    """Yield for each MLP and module of experts in ``plan`` the change to ``ops.swiglu``, or why there is none."""
    compared: dict[Hashable, str | None] = {}
    for name in plan.named(Role.MLP):
        module = model.get_submodule(name)
        linears = _linears(plan, name)
        fused = _with_operator(module, linears)
        like = likeness(module), tuple(linears.items())
        reason = compared[like] if like in compared else compared.setdefault(like, _differs(module, fused))
        if reason is not None or fused is None:
            yield FusionResult(name, reason or "")
        else:
            yield computed_by("swiglu", module, name, fused[0])
    for name in plan.named(Role.EXPERTS):
        experts = model.get_submodule(name)
        reason = _why_not(experts)
        change = Change("sets", name, GATE_METHOD, functools.partial(set_attribute, experts, GATE_METHOD, swiglu))
        yield FusionResult(name, reason or "", changes=() if reason else (change,))


def _linears(plan: ModelPlan, mlp: str) -> dict[Role, str]:
    """The attribute of ``mlp`` that is the linear, or PEFT's adapter around it, for each role."""
    roles = (Role.GATE, Role.UP, Role.GATE_UP, Role.DOWN)
    return {plan.roles[name]: name[len(mlp) :].lstrip(".").split(".")[0] for name in plan.inside(mlp, *roles)}


Fused = tuple[functools.partial[torch.Tensor], Mapping[str, tuple[int, int]]]
"""The forward of an MLP with the operator; (inputs, outputs) of its linears in the comparison, by name."""


def _with_operator(module: nn.Module, linears: dict[Role, str]) -> Fused | None:
    """The forward of ``module`` with the operator; None for an MLP without a gate."""
    if set(linears) == {Role.GATE, Role.UP, Role.DOWN}:
        gate = linears[Role.GATE]
        up = linears[Role.UP]
        down = linears[Role.DOWN]
        ours = functools.partial(with_two_linears, module, gate, up, down)
        return ours, {gate: (K, N), up: (K, N), down: (N, K)}
    if set(linears) == {Role.GATE_UP, Role.DOWN}:
        gate_up = linears[Role.GATE_UP]
        down = linears[Role.DOWN]
        return functools.partial(with_one_linear, module, gate_up, down), {gate_up: (K, 2 * N), down: (N, K)}
    return None


def _differs(module: nn.Module, fused: Fused | None) -> str | None:
    """Why ``module`` is left as it is; None where the operator computes the same."""
    if fused is None:
        return "it has no gate"
    if reason := own_forward(module):
        return reason
    ours, sizes = fused
    with isolated_on_cpu() as generator:
        small: dict[str, nn.Module] = {name: nn.Linear(*size).double() for name, size in sizes.items()}
        theirs = forward_of_copy(module, {}, small)
        mine = functools.partial(ours.func, theirs.__self__, *ours.args[1:])
        if not computes_the_same(theirs, mine, random_input(generator, 2, 3, K)):
            return f"{type(module).__name__} computes something else than SwiGLU"
    return None


def with_two_linears(module: nn.Module, gate: str, up: str, down: str, x: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)), with the outputs of ``gate`` and ``up`` in one tensor [2, B, S, I].

    Parallel linears write into it. The outputs of others are copied, which is what the kernel costs there.
    """
    inside = dict(module.named_children())
    out: torch.Tensor = inside[down](swiglu(stacked_outputs((inside[gate], inside[up]), x), 0).squeeze(0))
    return out


def with_one_linear(module: nn.Module, gate_up: str, down: str, x: torch.Tensor) -> torch.Tensor:
    """down(silu(gate) * up), with one linear ``gate_up`` whose outputs are all of the gate, then all of up."""
    inside = dict(module.named_children())
    out: torch.Tensor = inside[down](swiglu(inside[gate_up](x)))
    return out


GATE_METHOD = "_apply_gate"
"""The method of grouped and batched experts between their products (transformers 5, integrations.moe)."""


def _why_not(module: nn.Module) -> str | None:
    """Why the experts ``module`` are left as they are; None where the operator goes into them."""
    method: Callable[..., torch.Tensor] | None = inspect.getattr_static(type(module), GATE_METHOD, None)
    config = config_of(module)
    if method is None or config is None:
        return f"{type(module).__name__} is no module of experts that transformers chooses an implementation for"
    if config._experts_implementation in (None, "eager"):
        return (
            "each expert is computed by itself: choose set_experts_implementation('grouped_mm') or 'batched_mm', "
            "which compute all at once"
        )
    with isolated_on_cpu() as generator:
        if not computes_the_same(functools.partial(method, module), swiglu, random_input(generator, 3, 2 * N)):
            return f"{type(module).__name__} computes something else than SwiGLU"
    return None
