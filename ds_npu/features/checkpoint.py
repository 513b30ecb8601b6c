"""``ds_npu.checkpoint``: saves behind training, and the classes that loaded checkpoints may hold."""

from __future__ import annotations

from collections.abc import Iterable

from ds_npu.capability.named_classes import named_classes
from ds_npu.config.checkpoint import CheckpointSection
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change
from ds_npu.zero_ext.training_engine import TrainingEngine


def _unmet(section: CheckpointSection) -> list[str]:
    try:
        list(named_classes(section.allowed_classes))
    except ValueError as error:
        return [f"ds_npu.checkpoint.allowed_classes: {error}; name a class as package.module.Class"]
    return []


def _parts(section: CheckpointSection, build: Build) -> Iterable[Change]:
    if section.asynchronous:
        yield build.installed("checkpoints", "saved behind training", _save_behind_training)


def _save_behind_training(engine: TrainingEngine) -> list[str]:
    engine.save_behind_training()
    return []


CHECKPOINT: Feature[CheckpointSection] = Feature("checkpoint", parts=_parts, unmet=_unmet)
