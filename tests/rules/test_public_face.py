"""What ds_npu exports: the names that are promised, each from the module that defines it."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import ds_npu
import ds_npu.ops
import ds_npu.parallel


def imported_for_types(module) -> dict[str, str]:
    """By name, the module that a type checker is told it comes from."""
    tree = ast.parse(Path(module.__file__).read_text())
    nodes = [node for branch in tree.body if isinstance(branch, ast.If) for node in ast.walk(branch)]
    return {each.name: node.module for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names}


def test_parallel_exports_what_it_says():
    assert imported_for_types(ds_npu.parallel) == ds_npu.parallel.HOMES
    assert sorted(ds_npu.parallel.HOMES) == sorted(ds_npu.parallel.__all__)
    for name, home in ds_npu.parallel.HOMES.items():
        assert getattr(ds_npu.parallel, name) is getattr(importlib.import_module(home), name)


def test_the_operators_are_no_modules():
    assert all(not hasattr(getattr(ds_npu.ops, name), "__path__") for name in ds_npu.ops.__all__)
    assert callable(ds_npu.ops.rms_norm) and callable(ds_npu.ops.attention) and callable(ds_npu.from_pretrained)


def test_another_name_is_an_attribute_error():
    for module in (ds_npu, ds_npu.parallel):
        assert not hasattr(module, "no_such_name")
