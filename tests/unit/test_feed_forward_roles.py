"""Roles of an MLP's linears: by names, by transformers' plan, by sizes; nothing where they contradict each other."""

from __future__ import annotations

import pytest
from torch import nn

from ds_npu.models.feed_forward_roles import mlp_roles, pair_roles


def linears(**sizes: tuple[int, int]) -> dict[str, nn.Module]:
    return {name: nn.Linear(*each) for name, each in sizes.items()}


@pytest.mark.parametrize(
    ("sizes", "roles"),
    [
        ({"a": (8, 12), "b": (12, 8)}, {"a": "up", "b": "down"}),
        ({"w1": (8, 12), "w3": (8, 12), "w2": (12, 8)}, {"w1": "gate", "w3": "up", "w2": "down"}),
        ({"a": (8, 8), "b": (8, 8)}, {"a": "up", "b": "down"}),
        ({"a": (8, 24), "b": (12, 8)}, {}),
        ({"a": (8, 12), "b": (12, 4)}, {}),
        ({"a": (4, 12), "b": (12, 8)}, {}),
        ({"a": (8, 12)}, {}),
        ({"a": (8, 12), "b": (8, 12), "c": (8, 12), "d": (12, 8)}, {}),
    ],
)
def test_linears_of_any_names(sizes, roles):
    found = pair_roles(linears(**sizes), 8)
    assert {name: str(role) for name, role in found.items()} == roles


def test_names_and_the_plan_of_transformers_come_first():
    parts = linears(fc1=(8, 12), fc2=(12, 8)) | {"act": nn.GELU()}
    assert {name: str(role) for name, role in mlp_roles(parts, {}, 8).items()} == {"fc1": "up", "fc2": "down"}
    parts = linears(a=(8, 12), b=(12, 8))
    styles = {"a": "colwise", "b": "rowwise"}
    assert {name: str(role) for name, role in mlp_roles(parts, styles, 8).items()} == {"a": "column", "b": "row"}
    assert mlp_roles({"act": nn.GELU()}, {}, 8) == {}
