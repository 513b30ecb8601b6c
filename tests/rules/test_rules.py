"""The rules of the house: sizes, names, imports, links. Each is also shown something that it must complain about."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("accelerator", "ops", "zero_ext")
PACKAGE = ("ds_npu", *LINKS)
BESIDE = ("examples", "tests", "benchmarks")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
TOP = {*PACKAGE, *BESIDE, *PAGES, "docs", "setup.py", "pyproject.toml", "Makefile", ".ci", ".gitignore"}

FILE_LINES = 400
FUNCTION_LINES = 60
CPP_COLUMNS = 128
CLASS_LINES = 200
CLASS_METHODS = 20
PARAMETERS = 6
LINES_PER_GETATTR = 1000

UPSTREAM_SIGNATURES = {
    "ops/builders/fused_adam.py: multi_tensor_adam": "called by DeepSpeed's FusedAdam (ops/adam/fused_adam.py)",
}
"""``file: function`` whose parameters are not ours to choose, and whose they are."""

GUARDED_IMPORTS = {
    "ds_npu/engine/activation.py: _apply_patches": "an import hook must not raise into the import it follows",
}
"""``file: function`` that may catch what an import of ds_npu itself raises, and why."""

BAD_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|managers?|misc|v\d+)$")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))")
SOMEONES_FOLDER = re.compile(r"/(work|root|home|Users|tmp)/\w")


@dataclass(frozen=True)
class Source:
    """A Python file: its path from the repository's top, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def nodes(self, *kinds: type) -> Iterator:
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    def functions(self) -> Iterator[ast.FunctionDef]:
        return self.nodes(ast.FunctionDef, ast.AsyncFunctionDef)


def sources(*folders: str) -> list[Source]:
    """Every Python file of ``folders``, each once: links inside them are not followed."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    own = [path for path in found if path.resolve() == path]
    return [Source(str(path.relative_to(ROOT)), path.read_text()) for path in own]


# ---- rules: each yields its complaints about one file ----


def long_file(source: Source) -> Iterator[str]:
    if source.lines > FILE_LINES:
        yield f"{source.lines} lines"


def long_function(source: Source) -> Iterator[str]:
    for node in source.functions():
        lines = node.end_lineno - node.lineno + 1
        if lines > FUNCTION_LINES:
            yield f"{node.name} has {lines} lines"


def long_class(source: Source) -> Iterator[str]:
    for node in source.nodes(ast.ClassDef):
        lines = node.end_lineno - node.lineno + 1
        methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
        if lines > CLASS_LINES or methods > CLASS_METHODS:
            yield f"{node.name} has {lines} lines and {methods} methods"


def many_parameters(source: Source) -> Iterator[str]:
    for node in source.functions():
        named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = sum(each.arg not in ("self", "cls") for each in named)
        if count > PARAMETERS and f"{source.path}: {node.name}" not in UPSTREAM_SIGNATURES:
            yield f"{node.name} has {count} parameters"


def global_statement(source: Source) -> Iterator[str]:
    for node in source.nodes(ast.Global):
        yield f"line {node.lineno}: global {', '.join(node.names)}"


def tried_import(source: Source) -> Iterator[str]:
    """An import that may fail, outside of the package that keeps the reason."""
    if source.path.startswith("ds_npu/capability/"):
        return
    guarded = {
        id(inner)
        for node in source.functions()
        if f"{source.path}: {node.name}" in GUARDED_IMPORTS
        for inner in ast.walk(node)
    }
    for node in source.nodes(ast.Try, ast.With):
        if id(node) in guarded:
            continue
        inside = [each for statement in node.body for each in ast.walk(statement)]
        imports = any(isinstance(each, ast.Import | ast.ImportFrom) or _is_import_call(each) for each in inside)
        if isinstance(node, ast.Try):
            caught = [ast.unparse(each.type) for each in node.handlers if each.type]
            forgiving = bool(node.handlers)
        else:
            caught = [ast.unparse(item.context_expr) for item in node.items]
            forgiving = any("suppress(" in text for text in caught)
        if (imports and forgiving) or any("ImportError" in text or "ModuleNotFound" in text for text in caught):
            yield f"line {node.lineno}: an import that may fail"


def _is_import_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")


def relative_import(source: Source) -> Iterator[str]:
    for node in source.nodes(ast.ImportFrom):
        if node.level:
            yield f"line {node.lineno}: from {'.' * node.level}{node.module or ''}"


def bad_name(source: Source) -> Iterator[str]:
    for part in Path(source.path).with_suffix("").parts:
        if BAD_NAMES.search(part):
            yield f"{part} says nothing about what is in it"


def no_docstring(source: Source) -> Iterator[str]:
    if source.text and not ast.get_docstring(source.tree):
        yield "the module has no docstring"


def unfinished(source: Source) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and UNFINISHED.search(token.string):
            yield f"line {token.start[0]}: {token.string}"


@dataclass(frozen=True)
class Rule:
    """``complaints`` holds for the files of ``folders``; ``planted`` are sources that break it, by their paths."""

    complaints: Callable[[Source], Iterator[str]]
    folders: tuple[str, ...]
    planted: dict[str, str]


EVERYWHERE = (*PACKAGE, *BESIDE)
MANY = ", ".join("abcdefg")

RULES = (
    Rule(long_file, EVERYWHERE, {"ops/a.py": "\n" * (FILE_LINES + 1)}),
    Rule(long_function, EVERYWHERE, {"ops/a.py": "def f():\n" + "    pass\n" * FUNCTION_LINES}),
    Rule(
        long_class,
        EVERYWHERE,
        {
            "ops/lines.py": "class A:\n" + "    pass\n" * CLASS_LINES,
            "ops/methods.py": "class A:\n" + "    def f(self): ...\n" * (CLASS_METHODS + 1),
        },
    ),
    Rule(
        many_parameters,
        # Not in tests: pytest's fixtures are parameters, and a formula may have as many as it needs.
        (*PACKAGE, "examples", "benchmarks"),
        {
            "ops/a.py": f"def f({MANY}): ...",
            "ops/b.py": f"class A:\n    async def f(self, *, {MANY}): ...",
            "ops/c.py": f"def multi_tensor_adam({MANY}): ...",
        },
    ),
    Rule(global_statement, EVERYWHERE, {"ops/a.py": "def f():\n    global x\n    x = 1"}),
    Rule(
        tried_import,
        PACKAGE,
        {
            "ops/a.py": "try:\n    import torch_npu\nexcept Exception:\n    torch_npu = None",
            "ops/b.py": "try:\n    f()\nexcept (KeyError, ImportError):\n    pass",
            "ops/c.py": "try:\n    importlib.import_module('x')\nexcept RuntimeError:\n    pass",
            "ops/d.py": "with contextlib.suppress(Exception):\n    import torch_npu",
            "ops/e.py": "try:\n    if x:\n        from a import b\nexcept Exception:\n    pass",
        },
    ),
    Rule(relative_import, EVERYWHERE, {"ops/a.py": "from . import b", "ops/c.py": "from ..a import b"}),
    Rule(
        bad_name,
        EVERYWHERE,
        dict.fromkeys(("ops/utils.py", "ops/io_helpers.py", "common/a.py", "ops/manager.py", "ops/ring_v2.py"), ""),
    ),
    Rule(no_docstring, EVERYWHERE, {"ops/a.py": "import os"}),
    Rule(unfinished, EVERYWHERE, {"ops/a.py": "x = 1  # TODO: later", "ops/b.py": "# FIXME"}),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.complaints.__name__)
def test_the_tree_keeps(rule):
    found = [f"{source.path}: {text}" for source in sources(*rule.folders) for text in rule.complaints(source)]
    assert found == []


@pytest.mark.parametrize(
    ("rule", "path"),
    [(rule, path) for rule in RULES for path in rule.planted],
    ids=lambda value: value if isinstance(value, str) else value.complaints.__name__,
)
def test_what_is_noticed(rule, path):
    assert list(rule.complaints(Source(path, rule.planted[path])))


def test_what_is_allowed():
    """Next to each limit, and what only looks like a breach."""
    fine = {
        "ops/a.py": '"""A."""\n' + "\n" * (FILE_LINES - 1),
        "ops/b.py": '"""B: utils and TODO in a text."""\n' + "def f():\n" + "    pass\n" * (FUNCTION_LINES - 1),
        "ops/c.py": '"""C."""\n' + f"class A:\n    def f(self, {MANY[3:]}, *args, **kwargs): ...  # TODO(#12): more",
        "ops/d.py": '"""D."""\n' + "try:\n    f()\nfinally:\n    import a\nwith open(x):\n    import b",
        "ops/builders/fused_adam.py": '"""E."""\n' + f"def multi_tensor_adam({MANY}): ...",
        "ds_npu/capability/runtime.py": '"""F."""\n' + "try:\n    import a\nexcept ImportError:\n    pass",
    }
    for path, text in fine.items():
        assert [said for rule in RULES for said in rule.complaints(Source(path, text))] == [], path


def test_all_parts_of_the_tree_are_looked_at():
    seen = {source.path for source in sources(*EVERYWHERE)}
    here = Path(__file__).relative_to(ROOT)
    assert {"ds_npu/engine/engines.py", "accelerator/npu_accelerator.py", "ops/builders/builder.py"} <= seen
    assert {"zero_ext/gradient_norm.py", "examples/pretrain.py", "benchmarks/overhead.py", str(here)} <= seen
    assert not [path for path in seen if path.startswith(tuple(f"ds_npu/{name}/" for name in LINKS))]


def test_an_exemption_is_still_needed():
    for entry in UPSTREAM_SIGNATURES:
        path, name = entry.split(": ")
        renamed = Source("elsewhere.py", (ROOT / path).read_text())
        assert [said for said in many_parameters(renamed) if said.startswith(f"{name} ")], entry
    for entry in GUARDED_IMPORTS:
        renamed = Source("elsewhere.py", (ROOT / entry.split(": ")[0]).read_text())
        assert list(tried_import(renamed)), entry


# ---- rules about all of the tree ----


def attribute_guesses(tree: list[Source]) -> list[str]:
    """Calls of getattr and hasattr."""
    return [
        f"{source.path}:{node.lineno}"
        for source in tree
        for node in source.nodes(ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
    ]


def guesses_too_often(tree: list[Source]) -> bool:
    return len(attribute_guesses(tree)) * LINES_PER_GETATTR > sum(source.lines for source in tree)


def test_attributes_are_known_not_guessed():
    tree = sources(*PACKAGE)
    assert not guesses_too_often(tree), attribute_guesses(tree)
    assert guesses_too_often([Source("ops/a.py", "getattr(a, 'b')\nhasattr(a, 'b')" + "\n" * 1500)])
    assert not guesses_too_often([Source("ops/a.py", "getattr(a, 'b')" + "\n" * 1500)])


def wrong_links(package: Path) -> list[str]:
    """The folders of the top that ``package`` does not link to; pip and imports reach them through it only."""
    return [name for name in LINKS if not _links_to(package / name, f"../{name}")]


def _links_to(path: Path, target: str) -> bool:
    return path.is_symlink() and str(path.readlink()) == target


def test_the_links_stand(tmp_path):
    assert wrong_links(ROOT / "ds_npu") == []
    (tmp_path / "ops").mkdir()
    (tmp_path / "zero_ext").symlink_to("../ops")
    (tmp_path / "accelerator").symlink_to("../accelerator")
    assert wrong_links(tmp_path) == ["ops", "zero_ext"]


def taken_for_deepspeeds_own(folder: Path) -> list[str]:
    """What would make DeepSpeed, started at the top, take ``folder`` for its own source tree's accelerator/."""
    init = folder / "__init__.py"
    wrong = [] if init.is_file() and not init.read_bytes() else ["__init__.py is not an empty file"]
    return wrong + [path.name for path in folder.glob("abstract_accelerator*")]


def test_accelerator_is_not_taken_for_deepspeeds_own(tmp_path):
    assert taken_for_deepspeeds_own(ROOT / "accelerator") == []
    (tmp_path / "__init__.py").write_text("x = 1")
    (tmp_path / "abstract_accelerator.py").write_text("")
    assert len(taken_for_deepspeeds_own(tmp_path)) == 2


def top_names(folder: Path) -> set[str]:
    """What lies at the top, without git's own and what .gitignore leaves out."""
    ignored = [line.rstrip("/") for line in (folder / ".gitignore").read_text().split()]
    names = {path.name for path in folder.iterdir()} - {".git"}
    return {name for name in names if not any(fnmatch(name, pattern) for pattern in ignored)}


def test_the_top_level_is_complete_and_nothing_more(tmp_path):
    assert top_names(ROOT) == TOP
    (tmp_path / ".gitignore").write_text(".venv/\n*.egg-info/\n")
    for name in (".venv", "ds_npu.egg-info", "scripts"):
        (tmp_path / name).mkdir()
    assert top_names(tmp_path) == {".gitignore", "scripts"}


def machine_paths(text: str) -> list[str]:
    """Folders of somebody's machine."""
    return [match.group() for match in SOMEONES_FOLDER.finditer(text)]


def test_no_path_of_somebodys_machine():
    texts = [ROOT / name for name in ("Makefile", ".ci/run", *PAGES, "pyproject.toml", "setup.py")]
    texts += [path for name in (*EVERYWHERE, "docs") for path in (ROOT / name).rglob("*.*") if path.is_file()]
    readable = [path for path in texts if path.suffix in (".py", ".md", ".json", ".toml", ".pth", "")]
    found = {str(path.relative_to(ROOT)): machine_paths(path.read_text()) for path in readable}
    assert {path: said for path, said in found.items() if said} == {}
    assert machine_paths("cd " + "/home" + "/me") and not machine_paths("the work/home balance, /nowhere")


def cpp_complaints(text: str) -> list[str]:
    """A C++ source: its length, its width, its functions, and the sentence at its top that says what it holds."""
    lines = text.splitlines()
    found = [f"{len(lines)} lines"] if len(lines) > FILE_LINES else []
    found += [f"line {number} is too wide" for number, line in enumerate(lines, start=1) if len(line) > CPP_COLUMNS]
    found += [] if text.startswith("// ") else ["nothing at the top says what it holds"]
    begun = 0
    for number, line in enumerate(lines, start=1):
        if line.endswith("{") and not line.startswith((" ", "namespace", "extern", "class", "struct")):
            begun = number
        elif line == "}" and begun:
            found += [f"a function of {number - begun + 1} lines"] if number - begun >= FUNCTION_LINES else []
            begun = 0
    return found


def test_the_simulators_sources_keep_the_budgets():
    sources = [path for path in (ROOT / "ds_npu" / "simulator" / "csrc").rglob("*.*") if path.suffix in (".h", ".cpp")]
    assert len(sources) > 50
    complaints = {}
    for path in sources:
        # What a source with a header holds is said there.
        said = "" if path.suffix == ".h" or not path.with_suffix(".h").exists() else "// (header)\n"
        complaints[str(path.relative_to(ROOT))] = cpp_complaints(said + path.read_text())
    assert {name: found for name, found in complaints.items() if found} == {}


def test_a_cpp_source_over_a_budget_is_found():
    function = "void f() {\n" + "  g();\n" * FUNCTION_LINES + "}\n"
    assert cpp_complaints("// What it holds.\n" + function) == [f"a function of {FUNCTION_LINES + 2} lines"]
    assert cpp_complaints("// A.\n" * (FILE_LINES + 1)) == [f"{FILE_LINES + 1} lines"]
    assert cpp_complaints("// " + "x" * CPP_COLUMNS) == ["line 1 is too wide"]
    assert cpp_complaints("int a;\n") == ["nothing at the top says what it holds"]
