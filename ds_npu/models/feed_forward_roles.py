"""The linears of an MLP, by their names, by transformers' plan, or by their sizes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ds_npu.config.roles import Role
from ds_npu.models import kinds

IN_MLP: dict[str, Role] = {
    "gate_proj": Role.GATE,
    "up_proj": Role.UP,
    "gate_up_proj": Role.GATE_UP,
    "c_fc": Role.UP,
    "fc1": Role.UP,
    "down_proj": Role.DOWN,
    "c_proj": Role.DOWN,
    "fc2": Role.DOWN,
}
GATES_FIRST = {
    "GraniteMoeHybridMLP": ("input_linear", "output_linear"),
    "GraniteMoeSharedMLP": ("input_linear", "output_linear"),
    "MiniMaxM3VLDenseMLP": ("gate_up_proj", "down_proj"),
    "MoshiGatingMLP": ("fc1", "fc2"),
}
"""MLPs of transformers with all gates before all ups in one linear: the names of that and of the down projection."""
BY_STYLE = {"colwise": Role.COLUMN, "rowwise": Role.ROW}
"""Roles by the style of a linear in transformers' plan, where its name says nothing."""


def mlp_roles(children: Mapping[str, nn.Module], styles: Mapping[str, str | None], hidden: int) -> dict[str, Role]:
    """The roles of the linears among ``children``, the parts of an MLP, by attribute; empty where it is none.

    ``styles``: their styles in transformers' plan, None without one; ``hidden``: the width of hidden states.
    """
    linears = {name: each for name, each in children.items() if kinds.is_linear(each)}
    named = {name: IN_MLP.get(name) or BY_STYLE.get(styles.get(name) or "") for name in linears}
    found = {name: role for name, role in named.items() if role is not None}
    return found if len(found) == len(linears) else found | pair_roles(linears, hidden) if linears else {}


def pair_roles(linears: Mapping[str, nn.Module], hidden: int) -> dict[str, Role]:
    """UP (or GATE and UP) and DOWN among two or three linears, by their sizes alone.

    Empty where the sizes do not fit.
    """
    sizes = [kinds.sizes(each) for each in linears.values()]
    names = list(linears)
    if len(sizes) not in (2, 3) or sizes[0][0] != hidden:
        return {}
    downs = [index for index, (inputs, outputs) in enumerate(sizes) if index and outputs == hidden]
    wide = [index for index in range(len(sizes)) if index != downs[-1]] if downs else []
    inner = sizes[downs[-1]][0] if downs else 0
    if not wide or any(sizes[index] != (hidden, inner) for index in wide):
        return {}
    roles = [Role.UP] if len(wide) == 1 else [Role.GATE, Role.UP]
    return {names[index]: role for index, role in zip(wide, roles, strict=True)} | {names[downs[-1]]: Role.DOWN}
