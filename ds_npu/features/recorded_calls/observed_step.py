"""The forwards and backwards of an engine's optimizer step under a dispatch mode, which sees every operator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ds_npu.features.recorded_calls.module_calls import ModuleCalls, as_written, has_compiled_modules
from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method
from ds_npu.zero_ext.training_engine import BACKWARD, STEP, TrainingEngine

CALLS = ("forward", BACKWARD, "train_batch")
"""Methods of an engine that compute gradients."""


class PausedMode(TorchDispatchMode):
    """A dispatch mode that looks at no operator while ``is_paused``."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.is_paused = False


class ObservedStep:
    """Runs CALLS of ``engine`` under ``mode``, with their modules recorded in ``calls``, until ``finish``.

    The mode is paused in the optimizer's step. Compiled modules run eagerly; with ``leaves_compiled``, a model that
    has some runs compiled, and is not observed.
    """

    def __init__(
        self, engine: TrainingEngine, calls: ModuleCalls, mode: PausedMode, *, leaves_compiled: bool = False
    ) -> None:
        self._model = engine.module
        self._mode = mode
        self._leaves_compiled = leaves_compiled
        self._is_within = False
        self._undo = ExitStack()
        self._undo.enter_context(calls.recording())
        for name in (name for name in CALLS if hasattr(engine, name)):
            self._undo.callback(wrap_method(engine, name, self._observed, MethodLevel.RECORDED_STEP))
        self._undo.callback(wrap_method(engine, STEP, self._paused, MethodLevel.RECORDED_STEP))

    def finish(self) -> None:
        """Stop observing the calls."""
        self._undo.close()

    def _observed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_within or (self._leaves_compiled and has_compiled_modules(self._model)):
            return call(*args, **kwargs)
        self._is_within = True
        try:
            with as_written(self._model), self._mode:
                return call(*args, **kwargs)
        finally:
            self._is_within = False

    def _paused(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self._mode.is_paused
        self._mode.is_paused = True
        try:
            return call(*args, **kwargs)
        finally:
            self._mode.is_paused = before
