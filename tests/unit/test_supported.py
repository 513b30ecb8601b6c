"""The releases that ds_npu supports: one table, and a warning that names the installed release and the range."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ds_npu import capability
from ds_npu.capability import SUPPORTED, releases, unsupported
from ds_npu.engine import hooks

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("version", "held"),
    [
        ("5.6.0", True),
        ("5.6", True),
        ("5.19.0", True),
        ("5.23.0", True),
        ("5.23.7", True),
        ("5.6.0rc1", False),
        ("4.57.6", False),
        ("5.5.4", False),
        ("5.24.0", False),
        ("5.24.0.dev0", False),
        ("6.0", False),
        ("not a version", False),
    ],
)
def test_which_releases_are_held(version, held):
    assert releases.Releases("5.6.0", "5.23.0").hold(version) is held


def test_a_release_outside_of_its_range_is_named_with_the_range(monkeypatch):
    found = {"transformers": "4.57.6", "accelerate": "1.12.0", "trl": None, "peft": "0.30.1"}
    monkeypatch.setattr(releases, "installed_version", found.get)
    assert unsupported(found) == [
        f"peft 0.30.1 is installed, and ds_npu supports {SUPPORTED['peft']}",
        f"transformers 4.57.6 is installed, and ds_npu supports {SUPPORTED['transformers']}",
    ]
    assert unsupported(["accelerate", "numpy"]) == []


def test_only_what_is_imported_is_warned_of(monkeypatch):
    said = []
    monkeypatch.setattr(hooks, "warn_once", said.append)
    monkeypatch.setattr(releases, "installed_version", {"transformers": "4.57.6", "trl": "0.9"}.get)
    monkeypatch.setitem(sys.modules, "transformers", sys)
    monkeypatch.delitem(sys.modules, "trl", raising=False)
    hooks.warn_of_unsupported_releases()
    assert len(said) == 1 and "transformers 4.57.6" in said[0] and str(SUPPORTED["transformers"]) in said[0]


def test_this_environment_has_the_newest_releases():
    """Of what ``make env`` installs, so that the tests are those of the range's newest end."""
    for name in ("deepspeed", "transformers", "accelerate", "peft"):
        installed = capability.installed_version(name)
        assert SUPPORTED[name].hold(installed)


def test_what_is_installed_and_written_elsewhere_agrees_with_the_table():
    (line,) = re.findall(r'"(deepspeed>=[^"]*)"', (ROOT / "pyproject.toml").read_text())
    wanted = Requirement(line).specifier
    assert wanted.contains(SUPPORTED["deepspeed"].oldest) and wanted.contains(SUPPORTED["deepspeed"].newest)
    page = (ROOT / "docs" / "environment.md").read_text()
    for name, each in SUPPORTED.items():
        assert f"| {name} | {each.oldest} | {each.newest} |" in page, name
