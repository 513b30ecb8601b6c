"""``ds_npu.muon``: the scale of Muon's updates, and the coefficients of its iteration."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from ds_npu.config.muon import MuonSection
from ds_npu.config.sections import switched_on
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change
from ds_npu.ops.orthogonalisation import COEFFICIENTS
from ds_npu.zero_ext.matrix_optimizer import MatrixOptimizer, MatrixSettings
from ds_npu.zero_ext.training_engine import TrainingEngine


def _parts(section: MuonSection, build: Build) -> Iterable[Change]:
    asked = [f"{path} {value}" for path, value in switched_on(section)]
    if asked:
        yield build.installed("Muon's updates", ", ".join(asked), partial(_set, section))


def _set(section: MuonSection, engine: TrainingEngine) -> list[str]:
    if not isinstance(engine.basic_optimizer, MatrixOptimizer):
        raise ValueError(
            f"ds_npu.muon: found {dict(switched_on(section))} with the optimizer "
            f"{type(engine.basic_optimizer).__name__}. What to do: optimizer.type Muon; or leave ds_npu.muon out"
        )
    engine.basic_optimizer.settings = MatrixSettings(section.scale, COEFFICIENTS[section.coefficients])
    return []


MUON: Feature[MuonSection] = Feature("muon", parts=_parts)
