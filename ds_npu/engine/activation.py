"""Makes an unchanged DeepSpeed script use ds_npu: a finder that acts when certain modules have been imported.

Python reaches this module in three ways, all harmless when repeated: the line in ``ds_npu.pth`` at interpreter
start, the ``torch.backends`` entry point inside ``import torch``, and ``import ds_npu``. It imports nothing but the
standard library, and nothing it does at import time can raise into its importer.

[Note: torch_npu without CANN] ``import torch`` loads torch_npu through the same entry-point group and raises when
that fails, as it does wherever CANN is not set up (torch 2.13 ``torch/__init__.py::_import_device_backends``). The
guard turns that into one warning: while torch is being imported, a failing torch_npu is replaced by an empty stand-in
whose ``_autoload`` marks torch_npu as not importable (``sys.modules["torch_npu"] = None``), which every later
``import`` and ``importlib.util.find_spec`` understands. An ``import torch_npu`` of the user's own still raises, with
the same text, and DS_ACCELERATOR=npu, which cannot be had, ends the program with it. The order of entry points is
undefined, so only the ``.pth`` line makes sure that the guard is there first.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType], None]

PATCHED = (
    "deepspeed",
    "deepspeed.accelerator.npu_accelerator",
    "deepspeed.comm.comm",
    "deepspeed.env_report",
    "deepspeed.runtime.config",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.pipe.module",
    "deepspeed.runtime.zero.partition_parameters",
)
"""The modules that ``ds_npu.engine.patches`` changes; a test holds the two together."""


def autoload() -> None:
    """The ``torch.backends`` entry point: called inside ``import torch``; ``DS_NPU_AUTOLOAD=0`` turns it off."""
    if os.environ.get("DS_NPU_AUTOLOAD", "1") != "0":
        activate()


def activate() -> None:
    """Patch the modules of ``PATCHED`` that are imported, and see to it that the others are when they come."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name in PATCHED:
        if name in sys.modules and not _being_imported(name):
            _apply_patches(sys.modules[name])


def _being_imported(name: str) -> bool:
    spec = sys.modules[name].__spec__ if name in sys.modules else None
    return bool(spec and spec._initializing)  # type: ignore[attr-defined]


def _apply_patches(module: ModuleType) -> None:
    # Imported here: patches need DeepSpeed's neighbours, which most interpreters that start us never import.
    importlib.import_module("ds_npu.engine.patches").apply(module)


class _Finder(MetaPathFinder):
    """Finds modules as Python would, and for a few of them follows what happens when they are executed."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in PATCHED and name != "torch_npu":
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchNpuLoader(spec.loader) if name == "torch_npu" else _PatchingLoader(spec.loader)
        return spec


class _FollowingLoader(Loader):
    """Loads with ``loader``, which the module keeps as its own."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)


class _PatchingLoader(_FollowingLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _apply_patches(module)


class _TorchNpuLoader(_FollowingLoader):
    """[Note: torch_npu without CANN]"""

    def exec_module(self, module: ModuleType) -> None:
        autoload_switch = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
        try:
            super().exec_module(module)
        except Exception as error:
            _restore("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload_switch)
            for name in [name for name in sys.modules if name.startswith("torch_npu.")]:
                del sys.modules[name]
            text = importlib.import_module("ds_npu.capability").explain(error)
            if os.environ.get("DS_ACCELERATOR") == "npu":
                raise SystemExit(text) from None
            if not _being_imported("torch"):
                raise ImportError(text, name="torch_npu") from None
            importlib.import_module("ds_npu.log").warn_once(text)
            vars(module)["_autoload"] = _mark_torch_npu_not_importable


def _mark_torch_npu_not_importable() -> None:
    sys.modules["torch_npu"] = None  # type: ignore[assignment]


def _restore(variable: str, value: str | None) -> None:
    """torch_npu switches torch's autoloading off while it imports torch, and not on again when it fails."""
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value
