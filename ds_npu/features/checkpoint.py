"""``ds_npu.checkpoint``: the classes that loaded checkpoints may hold; the engine reads the section when it saves."""

from __future__ import annotations

from ds_npu.checkpoint.allowed_classes import named_classes
from ds_npu.config.checkpoint import CheckpointSection
from ds_npu.features.build import Feature


def _unmet(section: CheckpointSection) -> list[str]:
    try:
        list(named_classes(section.allowed_classes))
    except ValueError as error:
        return [f"ds_npu.checkpoint.allowed_classes: {error}; name a class as package.module.Class"]
    return []


CHECKPOINT: Feature[CheckpointSection] = Feature("checkpoint", unmet=_unmet)
