"""The linears of an MLP whose activation function can be computed again."""

from __future__ import annotations

from ds_npu.config.roles import Role
from ds_npu.models.plan import ModelPlan

COLUMNS = (Role.GATE, Role.UP, Role.GATE_UP, Role.COLUMN)
LAST = (Role.DOWN, Role.ROW)


def mlp_linears(plan: ModelPlan, mlp: str) -> tuple[list[str], str] | None:
    """The children of ``mlp`` that are its first linears, and the last one; None where they are not known."""
    columns, downs = children(plan, mlp, *COLUMNS), children(plan, mlp, *LAST)
    return (columns, downs[0]) if columns and len(downs) == 1 else None


def children(plan: ModelPlan, mlp: str, *roles: Role) -> list[str]:
    """The children of ``mlp`` in which modules of ``roles`` are."""
    inside = (name[len(mlp) :].lstrip(".").split(".")[0] for name in plan.inside(mlp, *roles))
    return list(dict.fromkeys(inside))
