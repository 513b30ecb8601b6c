"""A test that replaces a name of ds_npu replaces one that is there: else it injects a fault that nobody meets."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
from test_rules import Source, sources


def names_that_are_not_there(source: Source) -> Iterator[str]:
    """Assignments to attributes which a module or class of ds_npu, imported in ``source``, does not have."""
    imported = {name: path for node in ast.walk(source.tree) for name, path in _imported(node)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            path = imported.get(node.value.id)
            if path is not None and not hasattr(_found(path), node.attr):
                yield f"{source.path}:{node.lineno}: {path}.{node.attr}"


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ds_npu":
        yield from ((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)
    elif isinstance(node, ast.Import):
        ours = (each for each in node.names if each.asname and each.name.split(".")[0] == "ds_npu")
        yield from ((each.asname, each.name) for each in ours)


def _found(path: str) -> ModuleType | type:
    parent, _, name = path.rpartition(".")
    module = importlib.import_module(parent)
    return getattr(module, name) if hasattr(module, name) else importlib.import_module(path)


def test_what_tests_replace_is_there():
    assert [each for source in sources("tests", "benchmarks") for each in names_that_are_not_there(source)] == []


@pytest.mark.parametrize(
    ("line", "is_told"),
    [
        ("joint_calls.SHOWN = 1", False),
        ("joint_calls._timeout_s = None", True),
        ("joint_calls.SHOWN, joint_calls.LONGEST = 1, 2", True),
        ("joint_calls.JointCalls(None).other = 1", False),
    ],
)
def test_what_is_told(line, is_told):
    text = f"def f():\n    from ds_npu.engine.failures import joint_calls\n\n    {line}\n"
    assert bool(list(names_that_are_not_there(Source("tests/a.py", text)))) is is_told
