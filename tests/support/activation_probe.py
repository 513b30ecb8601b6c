"""What the subprocesses of the activation tests need: installed-looking folders, and which patches are in force."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = str(ROOT / "ds_npu" / "engine")


def write_entry_points(folder: Path, name: str, line: str, version: str) -> Path:
    """Writes metadata into ``folder`` that make importlib.metadata see ``name`` with one ``torch.backends`` entry."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    if not (info / "METADATA").exists():
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{line}\n")
    return folder


def write_ours(folder: Path) -> Path:
    """ds_npu's entry point, as pyproject.toml declares it."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    declared = re.search(r'^\[project\.entry-points\."torch\.backends"\]\n(.+)$', pyproject, re.MULTILINE)
    assert declared
    return write_entry_points(folder, "ds_npu", declared.group(1).replace('"', ""), "0.1.0")


def hide_torch_npu(folder: Path) -> Path:
    """Metadata into ``folder`` that hide those of an installed torch_npu, so that torch does not load it by itself."""
    write_entry_points(folder, "torch_npu", "", "2.13.0")
    return folder


def startup(folder: Path) -> str:
    """A line of code that makes Python process our ds_npu.pth, which it does for a site-packages folder only."""
    folder.mkdir(exist_ok=True)
    (folder / "ds_npu.pth").write_text((ROOT / "ds_npu" / "ds_npu.pth").read_text())
    return f"import site; site.addsitedir({str(folder)!r})\n"


def _is_ours(found: object) -> bool:
    if isinstance(found, type):
        return found.__module__.startswith("ds_npu.")
    return found.__code__.co_filename.startswith(OURS)


def unpatched() -> list[str]:
    """The targets of the patch table, and the copies of them, that are DeepSpeed's own; imports their modules."""
    from ds_npu.engine.patches import PATCHES, _attribute

    # As if it were not installed: without CANN transformers fails to import where it is.
    sys.modules["torch_npu"] = None
    names = []
    # ms-swift pins another transformers: it is in an environment of its own (make clients-env).
    here = [patch for patch in PATCHES if importlib.util.find_spec(patch.module.partition(".")[0]) is not None]
    assert {patch.module for patch in PATCHES if patch not in here} <= {
        "swift.dataloader.shard",
        "swift.trainers.mixin",
    }
    for patch in here:
        for place in (f"{patch.module}:{patch.name}", *patch.also):
            module, _, name = place.partition(":")
            if not _is_ours(_attribute(importlib.import_module(module), name.split(".")) or object):
                names.append(place)
    return names


def active() -> bool:
    """Whether a finder of ds_npu is in place."""
    return any(type(finder).__module__ == "ds_npu.engine.activation" for finder in sys.meta_path)
