"""README.md, docs/ and the other pages against the code: configs, commands, scripts, tables, links, names of files."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import gradient_rule as rule
import pytest
import torch.distributed as dist
from ranks import run_on_ranks
from test_key_rooms import feature_rooms

from ds_npu.accelerator.environment import DEFAULTS
from ds_npu.accelerator.npu_accelerator import EXPORTED_PREFIXES
from ds_npu.capability.releases import CANN_OF_TORCH_NPU, PYTHON_OF_TORCH
from ds_npu.cli.main import main
from ds_npu.config.schema import reference
from ds_npu.parallel.runtime.placement import sharding_of

ROOT = Path(__file__).resolve().parents[2]
TOP_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "examples/README.md")
PAGES = sorted([*(ROOT / name for name in TOP_PAGES), *(ROOT / "docs").glob("*.md")])
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in PAGES}
README_BYTES = 14 * 1024
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


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
"""Of Llama 3 8B's config.json, its sizes."""


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
    _, rest = TEXTS["docs/keys.md"].split("<!-- keys: written by `ds_npu schema --markdown` -->\n")
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
    _, after = TEXTS["docs/environment.md"].split("## Variables that ds_npu sets\n")
    table, _ = after.split("\n## ")
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [name for name, _ in DEFAULTS]
    _, after = TEXTS["docs/npu.md"].split("and these, which ds_npu adds:\n")
    assert re.findall(r"`(\w+)`", after.split("Put other variables")[0]) == list(EXPORTED_PREFIXES)


def test_every_variable_of_our_own_is_explained():
    paths = [path for suffix in ("py", "pth", "cpp", "h") for path in (ROOT / "ds_npu").rglob(f"*.{suffix}")]
    sources = [path.read_text() for path in paths]
    read = set(re.findall(r"\bDS_NPU_[A-Z_]*[A-Z]\b", "".join(sources)))
    assert {"DS_NPU_AUTOLOAD", "DS_NPU_CACHE"} < read
    assert read - set(re.findall(r"`(DS_NPU_\w+)", TEXTS["docs/environment.md"])) == set()


def named_files(text: str) -> list[str]:
    """Paths of this repository that a page names, in backquotes, in links or in commands."""
    linked = re.findall(r"\]\((?!https?:)([^)#]+)[)#]", text)
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
    assert own - set(named_files(TEXTS["docs/map.md"])) == set()


def test_every_key_has_its_part_of_the_map():
    parts = dict(part.split("\n", 1) for part in TEXTS["docs/map.md"].split("\n## "))
    assert {f"`{key}`" for key in feature_rooms()} <= parts.keys()
    for key, room in feature_rooms().items():
        named = [path for path in named_files(parts[f"`{key}`"]) if path.startswith(room.replace(".", "/"))]
        assert named, (key, room)


LONGEST_CELL = 200
"""Characters of a table's cell: longer ones cannot be read in the source, and hardly on a page."""


@pytest.mark.parametrize("page", TEXTS)
def test_cells_of_tables_are_short(page):
    lines = [line for line in TEXTS[page].splitlines() if line.startswith("|")]
    cells = [cell.strip() for line in lines for cell in re.split(r"(?<!\\)\|", line)]
    assert [cell for cell in cells if len(cell) > LONGEST_CELL] == []


LINK = re.compile(r"\]\(([^)#]*)#([^)]+)\)")


def anchors(text: str) -> set[str]:
    """What a link can name behind its #: the headings, as GitHub and GitLab spell them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_headings_that_are_linked_exist(page):
    lost = []
    for file, anchor in LINK.findall(TEXTS[page]):
        target = ((ROOT / page).parent / file).resolve() if file else ROOT / page
        if anchor not in anchors(target.read_text()):
            lost.append((file, anchor))
    assert lost == []


def test_a_lost_heading_is_noticed():
    assert anchors("# A `b`: c_d\ntext # no\n## E, f") == {"a-b-c_d", "e-f"}
    assert LINK.findall("[a](b.md#c-d), [e](#f), [g](h.md)") == [("b.md", "c-d"), ("", "f")]


def linked_pages(page: str) -> set[str]:
    """The pages of this repository that ``page`` links to, as paths from the top."""
    linked = re.findall(r"\]\(([^)#]+\.md)", TEXTS[page])
    return {str(((ROOT / page).parent / link).resolve().relative_to(ROOT)) for link in linked}


def test_every_page_is_one_click_from_the_index():
    assert set(TEXTS) - linked_pages("docs/README.md") <= {"docs/README.md"}


READ_ON = ("environment", "config", "keys", "errors", "models", "clients", "map", "README")


def test_the_readme_is_short_and_leads_on():
    assert (ROOT / "README.md").stat().st_size <= README_BYTES
    wanted = {*(f"docs/{name}.md" for name in READ_ON), *TOP_PAGES} - {"README.md"}
    assert wanted - linked_pages("README.md") == set()


def first_run(folder: Path) -> None:
    """On a rank: the config and the script of README.md, as a reader would copy them."""
    os.chdir(folder)
    # It takes a minute to compile, and the script does the same without.
    rule.without_extension()
    config, script = (blocks(TEXTS["README.md"], language)[0] for language in ("json", "python"))
    if dist.get_rank() == 0:
        Path("ds_config.json").write_text(config)
    dist.barrier()
    names: dict[str, object] = {}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(script, "train.py", "exec"), names)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (.*)$", said.getvalue(), re.MULTILINE)]
    assert any(sharding_of(weight) is not None for weight in names["model"].parameters())
    assert names["loss"].item() < 3.0
    assert len(losses) == (4 if dist.get_rank() == 0 else 0) and losses == sorted(losses, reverse=True)


@pytest.mark.slow
def test_the_first_run_of_the_readme_trains(tmp_path):
    run_on_ranks(2, first_run, tmp_path)
