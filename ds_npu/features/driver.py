"""Applies the features to a build, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ds_npu.config.problems import Problem
from ds_npu.config.sections import DsNpuConfig
from ds_npu.features.build import Build
from ds_npu.features.context_parallel.feature import CONTEXT_PARALLEL
from ds_npu.features.feature import Feature
from ds_npu.features.fused_ops.feature import FUSED_OPS
from ds_npu.features.plan import PLAN
from ds_npu.features.tensor_parallel.feature import PARALLEL
from ds_npu.features.tensor_parallel.tensor_overlap import TENSOR_OVERLAP

FEATURES: tuple[Feature[Any], ...] = (TENSOR_OVERLAP, PLAN, PARALLEL, FUSED_OPS, CONTEXT_PARALLEL)


def unmet(config: DsNpuConfig) -> Iterator[Problem]:
    """Yield why this machine cannot do what features of ``config`` need."""
    values = dict(config)
    for feature in FEATURES:
        for reason in feature.unmet(values[feature.key]):
            yield Problem(f"ds_npu.{feature.key}", values[feature.key], reason)


def apply_features(config: DsNpuConfig, build: Build) -> None:
    """Apply every feature to ``build`` with its value in ``config``, in the order of FEATURES."""
    values = dict(config)
    for feature in FEATURES:
        feature.apply(values[feature.key], build)
