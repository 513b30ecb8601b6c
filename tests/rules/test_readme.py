"""What README.md and docs/ say, held against the code: configs, commands with their output, tables, names of files."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_npu.accelerator.environment import DEFAULTS
from ds_npu.accelerator.npu_accelerator import EXPORTED_PREFIXES
from ds_npu.capability.releases import CANN_OF_TORCH_NPU, PYTHON_OF_TORCH
from ds_npu.cli.main import main
from ds_npu.config.schema import reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in PAGES}
FOLDERS = ("accelerator", "benchmarks", "docs", "ds_npu", "examples", "ops", "tests", "zero_ext")


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


CONFIGS = [(name, block) for name, text in TEXTS.items() for block in blocks(text, "json")]
SESSIONS = [(name, block) for name, text in TEXTS.items() for block in blocks(text, "console")]


def run(command: str) -> tuple[int, str]:
    """Exit code and output of ``ds_npu ...`` in this process."""
    program, *arguments = shlex.split(command, comments=True)
    assert program == "ds_npu", f"only ds_npu's own commands stand in console blocks: {command}"
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(arguments)
    return code, said.getvalue()


def commands(session: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines shown below it."""
    for part in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        command, *shown = part.rstrip("\n").split("\n")
        yield command, shown


def missing_line(shown: list[str], said: str) -> str | None:
    """The first shown line that is not printed, in this order; "..." stands for any number of lines."""
    printed = said.rstrip("\n").split("\n")
    place, gap = 0, False
    for line in shown:
        if line == "...":
            gap = True
            continue
        rest = printed[place:] if gap else printed[place : place + 1]
        if line not in rest:
            return line
        place += rest.index(line) + 1
        gap = False
    return None if gap or place == len(printed) else printed[place]


LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
"""Of Llama 3 8B's config.json, what is read of it."""


@pytest.fixture
def folder(tmp_path, monkeypatch, page):
    """A folder whose ds_config.json is the page's first config, and a folder with a model's config.json in it."""
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(blocks(TEXTS[page], "json")[0])
    Path("llama").mkdir()
    Path("llama", "config.json").write_text(json.dumps(LLAMA))


@pytest.mark.parametrize(("page", "config"), CONFIGS)
def test_a_config_on_a_page_is_right(folder, page, config):
    Path("ds_config.json").write_text(config)
    code, said = run("ds_npu check ds_config.json")
    assert code == 0 and "no mistake found" in said, said


@pytest.mark.parametrize(("page", "session"), SESSIONS)
def test_a_command_prints_what_is_shown(folder, page, session):
    for command, shown in commands(session):
        code, said = run(command)
        assert missing_line(shown, said) is None, said
        assert code == (1 if "mistake in" in shown[0] else 0)


def test_what_is_not_printed_is_noticed():
    said = "a\nb\nc\nd\n"
    assert [missing_line(shown.split(), said) for shown in ("a b c d", "a ... d", "... c d", "a b ...")] == [None] * 4
    assert [missing_line(shown.split(), said) for shown in ("a c", "a ... b d", "x ...", "a b c", "d ... a")] == [
        "c",
        "d",
        "x",
        "d",
        "d",
    ]


def test_there_is_something_to_check():
    assert len(CONFIGS) >= 2 and len(SESSIONS) >= 3 and "README.md" in TEXTS


def test_the_table_of_keys_is_the_codes():
    _, rest = TEXTS["README.md"].split("<!-- keys: written by `ds_npu schema --markdown` -->\n")
    table, _ = rest.split("<!-- end of keys -->")
    assert table.strip() == reference().strip()


def rows(text: str, *header: str) -> list[list[str]]:
    """The rows below a table's header."""
    _, rest = text.split(f"| {' | '.join(header)} |\n|---|---|\n")
    table = rest.split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_tables_of_versions_are_the_codes():
    page = TEXTS["docs/npu.md"]
    found = {version: cann for cann, versions in rows(page, "CANN", "torch_npu") for version in versions.split(", ")}
    assert found == CANN_OF_TORCH_NPU
    pythons = {torch: text for versions, text in rows(page, "torch", "Python") for torch in versions.split(", ")}
    assert pythons == {torch: f"3.{minors[0]} to 3.{minors[-1]}" for torch, minors in PYTHON_OF_TORCH.items()}


def test_the_variables_are_the_codes():
    page = TEXTS["docs/npu.md"]
    _, after = page.split("## Variables that ds_npu sets\n")
    table, _ = after.split("ds_npu's own variables:")
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [name for name, _ in DEFAULTS]
    _, after = page.split("or with one of these, which ds_npu adds:\n")
    assert re.findall(r"`(\w+)`", after.split("Other variables")[0]) == list(EXPORTED_PREFIXES)


def named_files(text: str) -> list[str]:
    """Paths of this repository that a page names, in backquotes, in links or in commands."""
    linked = re.findall(r"\]\(([^)#]+)\)", text)
    quoted = re.findall(rf"(?:{'|'.join(FOLDERS)})/[\w./*-]*", text)
    return [*linked, *(path.rstrip(".") for path in quoted)]


@pytest.mark.parametrize("page", TEXTS)
def test_files_that_are_named_exist(page):
    named = set(named_files(TEXTS[page]))
    bases = (ROOT, (ROOT / page).parent)
    lost = [path for path in named if not any((base / path).exists() for base in bases)]
    assert sorted(lost) == []


def test_a_lost_file_is_noticed():
    assert named_files("see [a](docs/a.md), `tests/test_b.py`.") == ["docs/a.md", "docs/a.md", "tests/test_b.py"]


def test_every_test_file_stands_in_the_table():
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("*/test_*.py") if path.parent.name != "npu"}
    assert own - set(named_files(TEXTS["README.md"])) == set()
