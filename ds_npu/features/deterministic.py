"""``ds_npu.deterministic``: kernels and sums over ranks that give the same bits each time.

torch then takes the deterministic form of its operators. Those without one are looked for in the forwards and backwards
of the first optimizer step, before the weights change, and named together with their modules; in later steps torch's
own error names the first one. torch_npu sets this for CANN's operators (aclrtSetSysParamOpt) and HCCL's reductions
(HcclSetConfig) when it runs the next operator (SetDeterministicOption in torch_npu's OpCommand.cpp); HCCL ignores it
where HCCL_DETERMINISTIC is set.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import deterministic

from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change
from ds_npu.features.recorded_calls.module_calls import ModuleCalls
from ds_npu.features.recorded_calls.observed_step import ObservedStep, PausedMode
from ds_npu.parallel.runtime.calls import Arguments, Keywords
from ds_npu.zero_ext.method_wraps import MethodLevel
from ds_npu.zero_ext.training_engine import TrainingEngine

REFUSAL = "does not have a deterministic implementation"
"""A part of torch's error for an operator without one."""
SHOWN = 20
VARIABLE = "HCCL_DETERMINISTIC"


def _unmet(value: bool) -> list[str]:
    found = os.environ.get(VARIABLE, "")
    if value and found.lower() == "false":
        return [f"no value while {VARIABLE}={found} is in the environment, which goes before it: unset the variable"]
    return []


def _parts(value: bool, build: Build) -> Iterable[Change]:
    if value:
        yield Change("provides", "deterministic kernels", "the same bits in each run, of the whole process", _switch_on)
        what = "names of operators without a deterministic form, in the first step"
        yield build.installed("a look at operators", what, _look_at_first_step)


class UnfitOperators(PausedMode):
    """Runs operators that have no deterministic form all the same, and notes them with their modules."""

    def __init__(self, calls: ModuleCalls) -> None:
        PausedMode.__init__(self)
        self.found: dict[tuple[str, str], None] = {}
        """Operator and module, in the order in which they ran."""
        self._calls = calls

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if self.is_paused or REFUSAL not in str(error):
                raise
        call, is_backward = self._calls.current()
        where = "outside of all modules" if call is None else f"{call}{', in backward' if is_backward else ''}"
        self.found[str(func), where] = None
        # torch refuses before it computes anything.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return func(*args, **(kwargs or {}))
        finally:
            torch.use_deterministic_algorithms(True)


def _look_at_first_step(engine: TrainingEngine) -> list[str]:
    calls = ModuleCalls(engine.module)
    operators = UnfitOperators(calls)
    if engine.is_deepcompile_enabled():
        return []
    # Run eagerly, a compiled first step would have other bits than the same step of a run that began earlier.
    steps = [ObservedStep(engine, calls, operators, leaves_compiled=True)]

    def before_step() -> None:
        if steps:
            steps.pop().finish()
            if operators.found:
                raise RuntimeError(_message(list(operators.found)))

    engine.events.before_step(MethodLevel.MEMORY_REPORT, before_step)
    return []


def _message(found: list[tuple[str, str]]) -> str:
    count = "1 operator has" if len(found) == 1 else f"{len(found)} operators have"
    listed = [f"{operator}: {where}" for operator, where in found[:SHOWN]]
    if len(found) > SHOWN:
        listed.append(f"and {len(found) - SHOWN} more")
    return "\n  ".join(
        [
            f"ds_npu.deterministic: {count} no deterministic form on this device; the weights have not changed",
            *listed,
            "What to do: write these modules with other operators; or leave the key out",
        ]
    )


def _switch_on() -> None:
    torch.use_deterministic_algorithms(True)
    # Else a kernel fills each new tensor with NaN, which changes nothing of a run that reads no such memory.
    options: Any = deterministic
    options.fill_uninitialized_memory = False


DETERMINISTIC: Feature[bool] = Feature("deterministic", parts=_parts, unmet=_unmet)
