"""The gated MLPs and experts of a model: SwiGLU (arXiv 2002.05202), SiLU and product, in one kernel."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator

import torch
from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.fused_ops.equivalence import (
    computes_the_same,
    forward_of_copy,
    isolated_on_cpu,
    own_forward,
    random_input,
)
from ds_npu.features.fused_ops.fusion_result import FusionResult
from ds_npu.models.attributes import set_attribute
from ds_npu.models.hugging_face_model import config_of
from ds_npu.models.plan import ModelPlan
from ds_npu.ops.swiglu import swiglu
from ds_npu.parallel.forward_wraps import replace_innermost_forward
from ds_npu.parallel.tensor.linear import stacked_outputs

K, N = 6, 10
"""Inputs and columns of the MLPs that are compared."""


def fuse_mlps(model: nn.Module, plan: ModelPlan) -> Iterator[FusionResult]:
    """Put ``ops.swiglu`` into every MLP, and all experts, of ``plan`` that compute the same."""
    for name in plan.named(Role.MLP):
        yield FusionResult(name, _fuse(model.get_submodule(name), _linears(plan, name)) or "")
    for name in plan.named(Role.EXPERTS):
        yield FusionResult(name, _fuse_experts(model.get_submodule(name)) or "")


def _linears(plan: ModelPlan, mlp: str) -> dict[Role, str]:
    """By role, the attribute of ``mlp`` that is a linear, or PEFT's adapter around one."""
    roles = (Role.GATE, Role.UP, Role.GATE_UP, Role.DOWN)
    return {plan.roles[name]: name[len(mlp) :].lstrip(".").split(".")[0] for name in plan.inside(mlp, *roles)}


def _fuse(module: nn.Module, linears: dict[Role, str]) -> str | None:
    """Fuse ``module``; returns why not where it was left as it is."""
    if set(linears) == {Role.GATE, Role.UP, Role.DOWN}:
        gate, up, down = linears[Role.GATE], linears[Role.UP], linears[Role.DOWN]
        ours = functools.partial(with_two_linears, module, gate, up, down)
        sizes = {gate: (K, N), up: (K, N), down: (N, K)}
    elif set(linears) == {Role.GATE_UP, Role.DOWN}:
        gate_up, down = linears[Role.GATE_UP], linears[Role.DOWN]
        ours = functools.partial(with_one_linear, module, gate_up, down)
        sizes = {gate_up: (K, 2 * N), down: (N, K)}
    else:
        return "it has no gate"
    if reason := own_forward(module):
        return reason
    with isolated_on_cpu() as generator:
        small: dict[str, nn.Module] = {name: nn.Linear(*size).double() for name, size in sizes.items()}
        theirs = forward_of_copy(module, {}, small)
        mine = functools.partial(ours.func, theirs.__self__, *ours.args[1:])
        if not computes_the_same(theirs, mine, random_input(generator, 2, 3, K)):
            return f"{type(module).__name__} computes something else than SwiGLU"
    replace_innermost_forward(module, ours)
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
"""What transformers' grouped and batched experts call between their products (transformers 5, integrations.moe)."""


def _fuse_experts(module: nn.Module) -> str | None:
    """Fuse the experts ``module``; returns why not where they were left as they are."""
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
    set_attribute(module, GATE_METHOD, swiglu)
    return None
