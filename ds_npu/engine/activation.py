"""Makes an unchanged DeepSpeed script use ds_npu: a finder that acts when certain modules have been imported.

Python reaches this module in three ways, all harmless when repeated: the line in ``ds_npu.pth`` at interpreter
start, the ``torch.backends`` entry point inside ``import torch``, and ``import ds_npu``. Every interpreter pays for
what is imported here, so it is little: no ``typing``, no ``importlib.abc``.

[Note: torch_npu without CANN] ``import torch`` loads torch_npu through the same entry-point group and raises when
that fails, as it does wherever CANN is not set up (torch 2.13 ``torch/__init__.py::_import_device_backends``). The
guard turns that into one warning: while torch is being imported, a failing torch_npu is replaced by an empty stand-in
whose ``_autoload`` marks torch_npu as not importable (``sys.modules["torch_npu"] = None``).
``importlib.util.find_spec`` then answers None, so that libraries that probe for it pass over it, and an
``import torch_npu`` in the script ends in Python's ModuleNotFoundError, below the warning. Where torch_npu is imported
first, or torch's autoloading is off, that import raises ImportError with the text of the warning, each time.
With DS_ACCELERATOR=npu the program ends with that text; with another accelerator there, nothing is printed.
The order of entry points is undefined, so only the ``.pth`` line makes sure that the guard is there first.

[Note: half imported] Where the entry point is the only way and ``import deepspeed`` the first import, ``deepspeed`` is
half executed when ds_npu is activated (at its line ``import torch``), and no loader of ours sees the end of it. Such a
module is patched when an attribute of it is first read after its import.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from typing import Any

PATCHED = (
    "accelerate.accelerator",
    "accelerate.data_loader",
    "accelerate.parallelism_config",
    "accelerate.scheduler",
    "accelerate.state",
    "accelerate.utils.operations",
    "accelerate.utils.random",
    "deepspeed",
    "deepspeed.accelerator.npu_accelerator",
    "deepspeed.comm.comm",
    "deepspeed.comm.torch",
    "deepspeed.env_report",
    "deepspeed.runtime.config",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.pipe.module",
    "deepspeed.runtime.utils",
    "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.utils.tensor_fragment",
    "swift.dataloader.shard",
    "swift.trainers.mixin",
    "transformers.integrations.deepspeed",
    "transformers.trainer",
    "transformers.trainer_jit_checkpoint",
    "transformers.training_args",
    "trl.trainer.grpo_config",
    "trl.trainer.grpo_trainer",
    "trl.trainer.rloo_config",
    "trl.trainer.rloo_trainer",
    "trl.trainer.utils",
)
"""The modules that ``ds_npu.engine.patches`` changes; a test compares both lists."""


def imported() -> None:
    """Activate on ``import ds_npu``, but not inside ``import torch``, which calls ``autoload`` next."""
    if not _being_imported("torch"):
        activate()


def autoload() -> None:
    """The ``torch.backends`` entry point: called inside ``import torch``, into which it never raises.

    ``DS_NPU_AUTOLOAD=0`` turns it off; ds_npu is then forgotten, so that a later ``import ds_npu`` activates it.
    """
    if os.environ.get("DS_NPU_AUTOLOAD", "1") != "0":
        try:
            activate()
        except Exception as error:
            _warn(f"ds_npu is not active: {type(error).__name__}: {error}")
    elif not _active():
        for name in [name for name in sys.modules if name.partition(".")[0] == "ds_npu"]:
            del sys.modules[name]


def activate() -> None:
    """Patch those modules of ``PATCHED`` that are imported now, and each other one when it is imported."""
    if _active():
        return
    sys.meta_path.insert(0, _Finder())
    for name in PATCHED:
        if _being_imported(name):
            sys.modules[name].__class__ = _HalfImported  # [Note: half imported]
        elif name in sys.modules:
            _apply_patches(sys.modules[name])


def _active() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def _being_imported(name: str) -> bool:
    return _unfinished(vars(sys.modules.get(name) or ModuleType(name)))


def _unfinished(module_vars: dict[str, Any]) -> bool:
    spec = module_vars.get("__spec__")
    return bool(spec and spec._initializing)


def _apply_patches(module: ModuleType) -> None:
    # Imported here: patches need DeepSpeed's neighbours, which most interpreters that start us never import.
    try:
        importlib.import_module("ds_npu.engine.patches").apply(module)
    except Exception as error:
        _warn(
            f"ds_npu is not active, and a ds_npu section in a config has no effect: what it changes in "
            f"{module.__name__} could not be changed ({type(error).__name__}: {error}). What to do: install ds_npu "
            f"again with its dependencies, or set DS_NPU_AUTOLOAD=0 to run without it."
        )


def _warn(text: str) -> None:
    importlib.import_module("ds_npu.log").warn_once(text)


class _HalfImported(ModuleType):
    """[Note: half imported]"""

    def __getattribute__(self, name: str) -> Any:
        if not _unfinished(super().__getattribute__("__dict__")):
            self.__class__ = ModuleType  # type: ignore[assignment]
            _apply_patches(self)
        return ModuleType.__getattribute__(self, name)  # not super(): this is no _HalfImported any more


class _Finder:
    """Finds modules as Python would, and gives a few of them a loader that acts when they are executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in PATCHED and name != "torch_npu":
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            following = _TorchNpuLoader if name == "torch_npu" else _PatchingLoader
            spec.loader = following(spec.loader)  # type: ignore[assignment]
        return spec


class _PatchingLoader:
    """Loads with ``loader``, which the module keeps as its own, and patches what it has loaded."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._execute(module)
        _apply_patches(module)

    def _execute(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)


class _TorchNpuLoader(_PatchingLoader):
    """[Note: torch_npu without CANN]"""

    why_not: str | None = None
    """Why torch_npu could not be imported in this process: executed a second time, it ends in another error."""

    def exec_module(self, module: ModuleType) -> None:
        if _TorchNpuLoader.why_not is None:
            _TorchNpuLoader.why_not = self._failure(module)
        text = _TorchNpuLoader.why_not
        if text is None:
            return
        accelerator = os.environ.get("DS_ACCELERATOR")
        if accelerator == "npu":
            raise SystemExit(text)
        if not accelerator and (_being_imported("torch") or _being_imported("deepspeed")):
            _warn(text)  # DeepSpeed catches the error and takes the CPU.
        if _being_imported("torch"):
            vars(module)["_autoload"] = _mark_torch_npu_not_importable
            return
        raise ImportError(text, name="torch_npu")

    def _failure(self, module: ModuleType) -> str | None:
        """Execute torch_npu and say why it cannot be imported; None if it can."""
        autoload_switch = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
        try:
            self._execute(module)
        except Exception as error:
            _restore("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload_switch)
            for name in [name for name in sys.modules if name.startswith("torch_npu.")]:
                del sys.modules[name]
            capability = importlib.import_module("ds_npu.capability")
            capability.remember_failure(error)
            text: str = capability.explain(error)
            return text
        return None


def _mark_torch_npu_not_importable() -> None:
    sys.modules["torch_npu"] = None  # type: ignore[assignment]


def _restore(variable: str, value: str | None) -> None:
    """Restore a variable: torch_npu sets it while it imports torch, and does not set it back when it fails."""
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value
