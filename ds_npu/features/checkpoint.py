"""``ds_npu.checkpoint``: asynchronous saves, copies in peers' memory, and classes in loaded checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

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
    if section.peer_copies is not None and section.peer_folder is not None:
        copy = partial(_copy_to_peers, Path(section.peer_folder), section.peer_copies)
        yield build.installed("copies of checkpoints", "in the memory of peers", copy)


def _save_behind_training(engine: TrainingEngine) -> list[str]:
    engine.save_behind_training()
    return []


def _copy_to_peers(folder: Path, steps: int, engine: TrainingEngine) -> list[str]:
    return [engine.copy_to_peers(folder, steps)]


CHECKPOINT: Feature[CheckpointSection] = Feature("checkpoint", parts=_parts, unmet=_unmet)
