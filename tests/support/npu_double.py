"""A double of torch_npu for machines that cannot import the real one: the few names ds_npu calls, and a record of it.

It shows that ds_npu calls these names in the right order with the right arguments, and nothing about a real NPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Marker:
    """mstx: numbers ranges from 1 while profiling, answers 0 while not (as mstx_mgr.cpp does)."""

    def __init__(self):
        self.profiling = True
        self.calls = []

    def range_start(self, message, stream=None, domain="default"):
        number = sum(call[0] == "start" for call in self.calls) + 1 if self.profiling else 0
        self.calls.append(("start", message, domain, number))
        return number

    def range_end(self, number, domain="default"):
        self.calls.append(("end", number, domain))


def make(devices=2, free=10, total=100, reserved=7, allocated=3):
    """The modules (torch_npu, torch_npu.npu) of a machine with ``devices`` NPUs; memory sizes in bytes."""
    npu = types.ModuleType("torch_npu.npu")
    npu.current = []
    npu.capturing = False
    npu.Event = npu.Stream = type("Unused", (), {})
    npu.mstx = Marker()
    npu.device_count = lambda: devices
    npu.is_available = lambda: devices > 0
    npu.set_device = npu.current.append
    npu.mem_get_info = lambda device=None: (free, total)
    npu.memory_reserved = lambda device=None: reserved
    npu.memory_allocated = lambda device=None: allocated
    npu.is_current_stream_capturing = lambda: npu.capturing
    npu.get_device_properties = lambda index: types.SimpleNamespace(name="Double910", total_memory=64 * 2**30)
    torch_npu = types.ModuleType("torch_npu")
    torch_npu.__version__ = "2.13.0"
    torch_npu.__file__ = "/double/torch_npu/__init__.py"
    torch_npu.npu = npu
    options = type("Options", (), {})
    hccl = types.SimpleNamespace(ProcessGroupHCCL=types.SimpleNamespace(Options=options))
    current = lambda: npu.current[-1] if npu.current else -1  # noqa: E731
    torch_npu._C = types.SimpleNamespace(_distributed_c10d=hccl, _npu_getDeviceWithoutSet=current)
    return torch_npu, npu


def install(monkeypatch, **machine):
    """Puts the double in the place of torch_npu and torch.npu for one test; returns torch_npu.npu."""
    import torch
    from deepspeed.accelerator import npu_accelerator

    from ds_npu.capability import runtime

    torch_npu, npu = make(**machine)
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    # Imported without torch.npu, that module of DeepSpeed before 0.19.8 lacks torch too.
    monkeypatch.setattr(npu_accelerator, "torch", torch, raising=False)
    monkeypatch.setattr(runtime, "_torch_npu", lambda: (torch_npu, None))
    return npu


def remove(monkeypatch):
    """Makes torch_npu look not installed to this process for one test."""
    find_spec, version = importlib.util.find_spec, importlib.metadata.version

    def no_version(name):
        if name == "torch_npu":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *to: find_spec(name, *to) if name != "torch_npu" else None
    )
    monkeypatch.setattr(importlib.metadata, "version", no_version)


def write_package(folder, *, body="", version="2.13.0", requires="torch==2.13.0.*"):
    """Writes an installed-looking torch_npu (metadata and all) into ``folder``; ``body`` is its whole code."""
    (folder / "torch_npu").mkdir(parents=True)
    (folder / "torch_npu" / "__init__.py").write_text(textwrap.dedent(body))
    info = folder / f"torch_npu-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\nRequires-Dist: {requires}\n"
    )
    return folder


# A package body that behaves as ``make`` and shows itself as torch.npu when torch is there.
WORKING = """
    import sys
    import npu_double
    _made, npu = npu_double.make(devices={devices})
    _C = _made._C
    __version__ = "2.13.0"
    sys.modules["torch_npu.npu"] = npu
    if "torch" in sys.modules:
        sys.modules["torch"].npu = npu
        sys.modules["torch.npu"] = npu
"""


def python(code, *paths, **environ):
    """Runs ``code`` in a new process with ``paths`` importable; returns its CompletedProcess."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ASCEND_", "HCCL_", "DS_"))}
    search = os.pathsep.join([*map(str, paths), str(ROOT), str(ROOT / "tests" / "support")])
    settings = {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environ}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**inherited, **settings},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
