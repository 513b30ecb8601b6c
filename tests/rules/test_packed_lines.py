"""Values that have nothing to do with each other are assigned one below the other, unless the line is short."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from test_rules import PACKAGE, Source, sources

COLUMNS = 80


def wide_packs(source: Source) -> Iterator[str]:
    """Long assignments of several values, none of which reads what another one is assigned to."""
    inside = {id(each): each for function in source.functions() for each in ast.walk(function)}
    for node in inside.values():
        if isinstance(node, ast.Assign) and _is_apart(node) and _columns(node) > COLUMNS:
            yield f"{source.path}:{node.lineno}: {ast.unparse(node)}"


def _columns(node: ast.Assign) -> int:
    """The columns of a line that has all of ``node``."""
    return node.end_col_offset if node.lineno == node.end_lineno else node.col_offset + len(ast.unparse(node))


def _is_apart(node: ast.Assign) -> bool:
    target, value = node.targets[0], node.value
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)):
        return False
    if any(isinstance(each, ast.Starred) for each in (*target.elts, *value.elts)):
        return False
    pairs = list(zip(target.elts, value.elts, strict=True))
    is_alike = all(ast.unparse(each).split(".")[-1].lstrip("_") == ast.unparse(given) for each, given in pairs)
    reads = (_reads(later, each) for at, (each, _) in enumerate(pairs) for _, later in pairs[at + 1 :])
    return not (is_alike or any(reads))


def _reads(value: ast.expr, target: ast.expr) -> bool:
    """Whether ``value`` may read ``target``; a call may read attributes and elements."""
    parts = list(ast.walk(value))
    names = {each.id for each in parts if isinstance(each, ast.Name)}
    names |= {each.attr for each in parts if isinstance(each, ast.Attribute)}
    is_called = any(isinstance(each, ast.Call) for each in parts)
    if isinstance(target, ast.Name):
        return target.id in names
    return not isinstance(target, ast.Attribute) or target.attr in names or is_called


def test_values_are_assigned_one_below_the_other():
    assert [each for source in sources(*PACKAGE) for each in wide_packs(source)] == []


@pytest.mark.parametrize(
    ("line", "is_told"),
    [
        (f"a, b = {'c' * 40}, {'d' * 40}", True),
        (f"self.a, b = {'c' * 40}, {'d' * 40}", True),
        (f"a, b = (\n        {'c' * 40},\n        {'d' * 40},\n    )", True),
        ("a, b = c, d", False),
        (f"self.{'c' * 20}, self._{'d' * 20} = {'c' * 20}, {'d' * 20}", False),
        (f"a, b = b, {'c' * 40}(a, {'d' * 40})", False),
        (f"self.a, b = {'c' * 40}, {'d' * 40}()", False),
    ],
)
def test_what_is_told(line, is_told):
    assert bool(list(wide_packs(Source("ops/a.py", f"def f():\n    {line}\n")))) is is_told
