"""Rotary position embedding of a model's queries and keys, in one kernel each.

Attention modules of transformers call a function of their source file by its name (``apply_rotary_pos_emb``). Neither
that file nor the class is changed: a module gets a forward of the same code, in which that name is ds_npu's function.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator

import torch
from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.fused_ops.fusion_result import FusionResult, computed_by
from ds_npu.features.modules.equivalence import computes_the_same, isolated_on_cpu, random_input
from ds_npu.models.plan import ModelPlan
from ds_npu.ops.layers import rotary
from ds_npu.parallel.runtime.forward_wraps import innermost_forward

PART_OF_NAME = "apply_rotary"
Rotation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., D]; members of a pair lie half of the width of cos apart, and x beyond that width is kept."""
    width = cos.shape[-1]
    x = x.to(torch.promote_types(x.dtype, cos.dtype))
    if width == x.shape[-1]:
        return rotary(x, cos, sin)
    return torch.cat((rotary(x[..., :width], cos, sin), x[..., width:]), dim=-1)


def rotate_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., D]; members of a pair are adjacent (GPT-J)."""
    return rotary(x.to(torch.promote_types(x.dtype, cos.dtype)), cos, sin, True)


def rotate_neighbours_to_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., D]; members of a pair are adjacent in x and D/2 apart in the result (DeepSeek-V3)."""
    return rotate_halves(torch.cat((x[..., ::2], x[..., 1::2]), dim=-1), cos, sin)


def rotate_by_first_angles(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``rotate_neighbours_to_halves`` with the angles of the first half of cos and sin (transformers 5.23)."""
    first = cos.shape[-1] // 2
    cos, sin = (torch.cat((each[..., :first], each[..., :first]), dim=-1) for each in (cos, sin))
    return rotate_neighbours_to_halves(x, cos, sin)


ROTATIONS: tuple[Rotation, ...] = (
    rotate_halves,
    rotate_neighbours_to_halves,
    rotate_by_first_angles,
    rotate_neighbours,
)


def both(
    rotate: Rotation, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> Pair:
    """Rotate queries and keys by cos and sin [B, S, D], which get the dim ``unsqueeze_dim`` of size 1.

    The arguments behind ``rotate`` are those of ``apply_rotary_pos_emb`` in transformers 5.
    """
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def signature_with_positions(rotate: Rotation) -> Callable[..., Pair]:
    """``rotate`` with the arguments of ``apply_rotary_pos_emb_interleave``, whose positions are not used."""

    def fused(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        unsqueeze_dim: int = 1,
    ) -> Pair:
        return both(rotate, q, k, cos, sin, unsqueeze_dim)

    return fused


SIGNATURES: dict[tuple[str, ...], Callable[[Rotation], Callable[..., Pair]]] = {
    tuple(inspect.signature(make(rotate_halves)).parameters): make
    for make in (lambda rotate: functools.partial(both, rotate), signature_with_positions)
}


def fuse_rotary(model: nn.Module, plan: ModelPlan) -> Iterator[FusionResult]:
    """Yield for each attention of ``plan`` the change to ``ops.rotary``, or why there is none."""
    if not plan.named(Role.ROTARY):
        return
    # One function for all modules of a class.
    fused = functools.cache(_fused)
    for name in plan.named(Role.ATTENTION):
        module = model.get_submodule(name)
        theirs = innermost_forward(module)
        if not isinstance(theirs, types.MethodType) or theirs.__func__ is not type(module).forward:
            yield FusionResult(name, "it has been given a forward of its own already")
            continue
        ours = fused(theirs.__func__)
        if isinstance(ours, str):
            yield FusionResult(name, ours)
        else:
            yield computed_by("rotary", module, name, types.MethodType(ours, module))


def _fused(forward: types.FunctionType) -> types.FunctionType | str:
    """``forward`` with ds_npu's functions in place of those it calls, or why there is none."""
    known = forward.__globals__
    called = [name for name in forward.__code__.co_names if name.startswith(PART_OF_NAME) and name in known]
    if not called:
        return f"{forward.__qualname__} calls no {PART_OF_NAME}_pos_emb of its file"
    ours: dict[str, Callable[..., Pair]] = {}
    for name in called:
        found = _equal(known[name])
        if isinstance(found, str):
            return f"{name} {found}"
        ours[name] = found
    made = types.FunctionType(
        forward.__code__, {**known, **ours}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    functools.update_wrapper(made, forward)
    return made


def _equal(theirs: Callable[..., Pair]) -> Callable[..., Pair] | str:
    """ds_npu's function that computes what ``theirs`` does, or why there is none."""
    parameters = tuple(inspect.signature(theirs).parameters)
    if parameters not in SIGNATURES:
        return f"takes other arguments than are known: {', '.join(parameters)}"
    with isolated_on_cpu() as generator:
        q_BNSD = random_input(generator, 2, 4, 5, 8)
        k_BNSD = random_input(generator, 2, 2, 5, 8)
        q_BSND, k_BSND = (x.detach().transpose(1, 2).requires_grad_() for x in (q_BNSD, k_BNSD))
        cos = random_input(generator, 2, 5, 8)
        sin = random_input(generator, 2, 5, 8)
        for rotate in ROTATIONS:
            ours = SIGNATURES[parameters](rotate)
            heads_second = computes_the_same(theirs, ours, q_BNSD, k_BNSD, cos, sin)
            heads_third = computes_the_same(
                functools.partial(theirs, unsqueeze_dim=2), functools.partial(ours, unsqueeze_dim=2),
                q_BSND, k_BSND, cos, sin,
            )  # fmt: skip
            if heads_second and heads_third and _same_part(theirs, ours, (q_BNSD, k_BNSD, cos, sin)):
                return ours
    return "computes something else than a rotary embedding"


def _same_part(theirs: Callable[..., Pair], ours: Callable[..., Pair], inputs: tuple[torch.Tensor, ...]) -> bool:
    """Whether both do the same with cos and sin narrower than the heads, or ``theirs`` raises for these."""
    q, k, cos, sin = inputs
    narrow = (q, k, cos[..., :4].detach(), sin[..., :4].detach())
    try:
        theirs(*narrow)
    except RuntimeError:
        return True
    return computes_the_same(theirs, ours, *narrow)
