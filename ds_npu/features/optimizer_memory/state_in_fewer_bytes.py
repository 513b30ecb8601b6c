"""``ds_npu.optimizer_memory``: optimizer state in fewer bytes on the device."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from ds_npu.config.optimizer_memory import OptimizerMemorySection
from ds_npu.config.sections import switched_on
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change
from ds_npu.memory.state_chunks import Keeping
from ds_npu.zero_ext.optimizer_state import KeptState, why_not_kept
from ds_npu.zero_ext.training_engine import TrainingEngine

GIB = 1 << 30


def _parts(section: OptimizerMemorySection, build: Build) -> Iterable[Change]:
    asked = [path for path, _ in switched_on(section)]
    if asked:
        yield build.installed("the optimizer's state", f"kept with {', '.join(asked)}", partial(_keep_state, section))


def _keep_state(section: OptimizerMemorySection, engine: TrainingEngine) -> list[str]:
    if engine.basic_optimizer is None:
        return ["ds_npu.optimizer_memory has no effect: this engine has no optimizer"]
    if reason := why_not_kept(engine.optimizer):
        raise ValueError(f"ds_npu.optimizer_memory: {reason}. Or leave ds_npu.optimizer_memory out")
    keeping = Keeping(section.share_fp32, section.moments)
    state = KeptState(engine.optimizer, keeping, section.resident_gib * GIB if section.swap else None)
    state.install()
    return [f"optimizer_memory: {state}"]


OPTIMIZER_MEMORY: Feature[OptimizerMemorySection] = Feature("optimizer_memory", parts=_parts)
