"""Bases of the operator builders.

DeepSpeed lists every name ending in "Builder" in the modules of this folder, except in this one. So the bases are here,
and the other modules use them, and DeepSpeed's own builders, as attributes of modules.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from typing import Any, ClassVar

from deepspeed.ops.op_builder import npu
from deepspeed.ops.op_builder.builder import OpBuilder

from ds_npu import capability


class Answer:
    """Mixin of a builder that keeps the reason whenever it says no."""

    error_log: str | None
    name: str

    def missing(self) -> str:
        """The reason why something that this operator needs is missing; empty if none is known."""
        return str(capability.torch_npu_importable() or "")

    def why_not(self) -> str:
        """Why ``is_compatible`` says no; empty if it says yes."""
        return "" if self.is_compatible() else self.error_log or "DeepSpeed gives no reason"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the operator can be loaded here; if not, ``error_log`` keeps the reason for jit_load."""
        self.error_log = self.missing() or None
        if self.error_log and verbose:
            loud: Any = self
            loud.warning(f"{self.name}: {self.error_log}")
        upstream: Any = super()
        return self.error_log is None and bool(upstream.is_compatible(verbose))


class AscendPaths(Answer):
    """Mixin of DeepSpeed's NPU builders: constructed without CANN and without torch_npu, they raise nothing.

    The built-in constructor raises KeyError without ASCEND_HOME_PATH and NameError without torch_npu
    (deepspeed/ops/op_builder/npu/builder.py), so it is passed over.
    """

    NAME: ClassVar[str]

    def __init__(self, name: str | None = None) -> None:
        OpBuilder.__init__(self, self.NAME if name is None else name)
        home = capability.torch_npu_path()
        # Empty paths keep the lists of compiler options printable; is_compatible stops a build before they are used.
        self._ascend_path = self.installed_cann_path() or ""
        self._torch_npu_path = str(home) if home else ""
        self._cann_version = self.installed_cann_version(self.name)

    def installed_cann_path(self) -> str | None:
        """ASCEND_HOME_PATH where it names a folder."""
        home = capability.cann_home()
        return str(home) if home else None

    def installed_cann_version(self, name: str = "") -> str:
        """CANN's version; empty if unknown, which compiles the operator without CANN's part (__DISABLE_CANN__)."""
        return capability.cann_version() or ""


def missing_compiler() -> str:
    """The missing program without which no C++ operator is compiled; empty if none is missing."""
    for program in ("g++", "ninja"):
        if not shutil.which(program):
            return f"{program} is not on PATH, and the operator is compiled when it is first used; install {program}"
    return ""


class Compiled(AscendPaths):
    """Mixin of DeepSpeed's NPU builders that compile C++ against CANN and torch_npu."""

    def missing(self) -> str:
        return super().missing() or str(capability.missing_cann() or "") or missing_compiler()


class NotImplementedBuilder(AscendPaths, npu.NotImplementedBuilder):  # type: ignore[misc]
    """The builder of an operator that has no NPU implementation; ``load`` raises ValueError."""

    def missing(self) -> str:
        return "DeepSpeed has no NPU implementation of this operator"


def upstream(name: str) -> Any:
    """The base of a builder that only later versions of DeepSpeed have for NPUs (Lamb, Lion, Quantizer: 0.19.8)."""
    base = getattr(npu, name, None)
    return type(name, (AscendPaths, base), {"__module__": __name__}) if base else NotImplementedBuilder


class ModuleBuilder(AscendPaths, npu.builder.NPUOpBuilder):  # type: ignore[misc]
    """Base of ds_npu's own builders: the operator is a Python module, and nothing is compiled.

    A subclass names the operator (``NAME``), its build switch (``BUILD_VAR``) and the module (``MODULE``), and may say
    in ``missing`` what else it needs. ds_report lists it because it is in this folder and in its ``__init__``.
    """

    BUILD_VAR: ClassVar[str] = ""
    MODULE: ClassVar[str]

    def absolute_name(self) -> str:
        return self.MODULE

    def sources(self) -> list[str]:
        return []

    def include_paths(self) -> list[str]:
        return []

    def cxx_args(self) -> list[str]:
        return []

    def extra_ldflags(self) -> list[str]:
        return []

    def load(self, verbose: bool = False) -> Any:
        """The module. Raises RuntimeError with the reason where the operator cannot be used here."""
        reason = self.why_not()
        if reason:
            raise RuntimeError(f"operator {self.name} cannot be loaded: {reason}")
        return sys.modules.get(self.MODULE) or importlib.import_module(self.MODULE)
