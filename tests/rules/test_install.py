"""What ``pip install`` puts where: real files in place of links, the start-up line, the entry point, the command."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "ds_npu", "accelerator", "ops", "zero_ext")
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]


@pytest.fixture
def checkout(tmp_path):
    """A copy of what an installation is built from, so that the build leaves nothing in the checkout."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, folder / name)
    return folder


def modules(folder):
    """Python files below ``folder``, links followed."""
    return {str(path.relative_to(folder)) for top in [folder, *folder.iterdir()] for path in top.rglob("*.py")}


@pytest.mark.slow
def test_an_installation_has_every_file_and_its_startup_line(checkout, tmp_path):
    target = tmp_path / "target"
    subprocess.run([*PIP, "--target", str(target), str(checkout)], check=True, timeout=300)
    assert modules(target / "ds_npu") == modules(checkout / "ds_npu")
    assert {"ops/builders/builder.py", "accelerator/npu_accelerator.py", "zero_ext/gradient_norm.py"} < modules(
        target / "ds_npu"
    )
    assert not [path for path in target.rglob("*") if path.is_symlink()]
    assert (target / "ds_npu.pth").read_text() == (ROOT / "ds_npu" / "ds_npu.pth").read_text()
    assert (target / "ds_npu" / "py.typed").exists()
    assert all((target / "ds_npu" / each).exists() for each in ("topology/machines.json", "config/deepspeed_versions"))
    (info,) = target.glob("ds_npu-*.dist-info")
    assert "ds_npu.engine.activation:autoload" in (info / "entry_points.txt").read_text()
    assert "ds_npu.pth" in (info / "RECORD").read_text()
    assert {path.name for path in target.iterdir()} == {"ds_npu", "ds_npu.pth", "bin", info.name}


@pytest.mark.slow
def test_a_checkout_without_its_links_is_refused_with_the_way_out(checkout):
    (checkout / "ds_npu" / "ops").unlink()
    (checkout / "ds_npu" / "ops").write_text("../ops")
    done = subprocess.run(
        [sys.executable, "setup.py", "--name"], cwd=checkout, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "ds_npu/ops is not a folder" in done.stderr
    assert "core.symlinks=true" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_startup_line_is_one_line_that_python_runs():
    """Python runs the lines of a .pth file that begin with ``import``; any other is taken for a folder."""
    (line,) = (ROOT / "ds_npu" / "ds_npu.pth").read_text().splitlines()
    assert line.startswith("import ")
    compile(line, "ds_npu.pth", "exec")
