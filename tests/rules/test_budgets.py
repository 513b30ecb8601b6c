"""What mypy and import-linter cannot see, counted: dynamic imports and attributes, Any, casts, misleading names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest
from test_rules import PACKAGE, ROOT, Source, sources

BUDGETS = {"vars": 20, "import_module": 12, "cast": 3, "type: ignore": 50}
"""In all of the package."""
ANY_PER_1000_LINES = 12
FOREIGN = ("ds_npu/engine/", "zero_ext/")
"""Folders whose objects are DeepSpeed's, which has no types: Any is not counted there."""

NAMESAKES = {
    "COMMAND": "one for each module of the command line, which looks for this name",
    "Config": "the raw config, which each reader takes in another form",
    "Function": "any callable, in two tables of hooks",
    "Pair": "of tensors, local to two modules",
    "Block": "of keys and values: what arrives in a ring, and what one step of the reference computes",
    "Read": "what one reader makes of its input",
    "TYPE_CHECKING": "typing's, without importing typing",
    "installed_cann_path": "the hook is called as what it replaces",
    "narrowed": "a grid without an axis; an LSE column without padding",
    "report": "ds_report's part about NPUs, and in it the operators'",
    "reference": "each operator's, and the page of keys",
    "sample": "each operator's",
    "forward": "attention's, in each way of computing it",
    "backward": "attention's, in each way of computing it",
    "unmet": "what this machine lacks: for the section, for one kernel",
}
"""Names that several modules define, and why that misleads nobody. Operators and their kernels have one name."""


def package() -> list[Source]:
    return sources(*PACKAGE)


def used(source: Source) -> Iterator[str]:
    """One entry for each use of what is counted."""
    for node in source.nodes(ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in BUDGETS:
            yield name
    yield from ["type: ignore"] * source.text.count("type: ignore")


def over_budget(found: list[Source], budgets: dict[str, int]) -> list[str]:
    counts: dict[str, int] = defaultdict(int)
    for source in found:
        for name in used(source):
            counts[name] += 1
    return [f"{name}: {counts[name]}, at most {most}" for name, most in budgets.items() if counts[name] > most]


def share_of_any(found: list[Source]) -> float:
    """Uses of Any in 1000 lines."""
    counted = [source for source in found if not source.path.startswith(FOREIGN)]
    uses = sum(node.id == "Any" for source in counted for node in source.nodes(ast.Name))
    return 1000 * uses / max(1, sum(source.lines for source in counted))


def public_names(source: Source) -> Iterator[str]:
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


def misleading(found: list[Source]) -> list[str]:
    """Public functions and classes of one name in several modules, apart from operators and their kernels."""
    homes: dict[str, set[str]] = defaultdict(set)
    for source in found:
        for name in public_names(source):
            if not name.startswith("_"):
                homes[name].add(source.path)
    return [f"{name}: {sorted(paths)}" for name, paths in homes.items() if len(paths) > 1 and name not in NAMESAKES]


def unused(found: list[Source], texts: str) -> list[str]:
    words: dict[str, int] = defaultdict(int)
    for word in re.findall(r"\w+", texts):
        words[word] += 1
    return [f"{source.path}: {name}" for source in found for name in public_names(source) if words[name] < 2]


def test_the_package_keeps_its_budgets():
    assert over_budget(package(), BUDGETS) == []
    assert share_of_any(package()) <= ANY_PER_1000_LINES


def test_no_two_functions_or_classes_share_a_name():
    assert misleading(package()) == []


def test_every_public_name_is_used():
    texts = "\n".join(
        path.read_text() for folder in (*PACKAGE, "tests", "docs") for path in (ROOT / folder).rglob("*.py")
    )
    assert unused(package(), texts) == []


@pytest.mark.parametrize("name", BUDGETS)
def test_what_is_over_its_budget_is_noticed(name):
    text = "x = 1  # type: ignore\n" if name == "type: ignore" else f"x = a.{name}(y)\n"
    assert over_budget([Source("ds_npu/a.py", text * 3)], {name: 2}) == [f"{name}: 3, at most 2"]


def test_the_other_rules_complain_too():
    one, other = (Source(path, "def f(x: Any) -> None: ...\n") for path in ("ds_npu/a.py", "ds_npu/b.py"))
    assert share_of_any([one]) == 1000 and share_of_any([Source("zero_ext/a.py", one.text)]) == 0
    assert misleading([one, other]) == ["f: ['ds_npu/a.py', 'ds_npu/b.py']"]
    assert unused([one], one.text) == ["ds_npu/a.py: f"] and unused([one], one.text + "f()") == []
