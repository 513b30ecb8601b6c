"""Asks the features for their changes, checks these against each other, and only then makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

from ds_npu.config.problems import Problem
from ds_npu.config.sections import DsNpuConfig
from ds_npu.features.build import Build, Feature
from ds_npu.features.checkpoint import CHECKPOINT
from ds_npu.features.chunked_loss.loss_by_chunks import CHUNKED_LOSS
from ds_npu.features.context_parallel.context_ranks import CONTEXT_PARALLEL
from ds_npu.features.declaration import Declaration, Phase, check_declarations
from ds_npu.features.deterministic import DETERMINISTIC
from ds_npu.features.dump.dumped_steps import DUMP
from ds_npu.features.experts.expert_ranks import MOE
from ds_npu.features.fused_ops.fused_operators import FUSED_OPS
from ds_npu.features.hccl.opened_communicators import HCCL
from ds_npu.features.memory_report.reported_step import MEMORY_REPORT
from ds_npu.features.muon import MUON
from ds_npu.features.optimizer_memory.state_in_fewer_bytes import OPTIMIZER_MEMORY
from ds_npu.features.pipeline.pipeline_ranks import PIPELINE
from ds_npu.features.plan import PLAN
from ds_npu.features.profile.profiled_steps import PROFILE
from ds_npu.features.recompute.recomputed_modules import RECOMPUTE
from ds_npu.features.swap.swapped_modules import SWAP
from ds_npu.features.tensor_parallel.tensor_ranks import PARALLEL, TENSOR_OVERLAP
from ds_npu.features.watch.watches import WATCH
from ds_npu.log import logger
from ds_npu.models.plan import PlanError
from ds_npu.parallel.runtime.marks import Mark

FEATURES: tuple[Feature[Any], ...] = (
    HCCL,
    TENSOR_OVERLAP,
    PLAN,
    PIPELINE,
    PARALLEL,
    MOE,
    FUSED_OPS,
    CHUNKED_LOSS,
    CONTEXT_PARALLEL,
    RECOMPUTE,
    SWAP,
    MEMORY_REPORT,
    OPTIMIZER_MEMORY,
    MUON,
    DETERMINISTIC,
    CHECKPOINT,
    WATCH,
    DUMP,
    PROFILE,
)
CHANGED_FOR: Mark[dict[str, str]] = Mark("changed for")
"""The values for which features changed a model, as texts (``Feature.asked``), by key."""

Values = Sequence[tuple[Feature[Any], Any]]


def unmet(config: DsNpuConfig) -> Iterator[Problem]:
    """Yield why this machine cannot do what features of ``config`` need."""
    for feature, value in values_in(config):
        for reason in feature.unmet(value):
            yield Problem(f"ds_npu.{feature.key}", value, reason)


def values_in(config: DsNpuConfig) -> Values:
    """Every feature with its value in ``config``."""
    values = dict(config)
    return [(feature, values[feature.key]) for feature in FEATURES]


def apply_features(features: Values, build: Build) -> list[Declaration]:
    """Change the model of ``build``, and provide its engine's parts, as ``features`` declare, phase by phase.

    Returns the declarations. An engine that is only planned gets no parts. Raises, before the model changes (except for
    its stages, on which the other features depend): the error of a feature that cannot do its part, ConflictError where
    two features contradict each other, ValueError where the model was changed for something else before.
    """
    parts = declare_parts(features, build)
    asked = {feature.key: feature.asked(value, build) for feature, value in features}
    check_declarations(build.model, parts)
    for declaration in parts if not build.is_planned else ():
        declaration.apply()
    in_stages = [each for each in features if each[0].phase is Phase.STAGES]
    others = [each for each in features if each[0].phase is not Phase.STAGES]
    done = list(parts)
    for values in (in_stages, others):
        declarations = declare(values, build)
        check_declarations(build.model, declarations)
        for declaration in declarations:
            declaration.apply()
        done += declarations
    build.declared += done
    for line in build.notes if not build.is_planned else ():
        logger().info("%s", line)
    before = changed_for(build.model)
    CHANGED_FOR.set(build.model, before | {key: each for key, each in asked.items() if each})
    return done


def change_by_plan(build: Build) -> None:
    """Declare, check and make the changes that a plan has chosen since the last step, if it has.

    Raises the error of a feature that cannot do its part, and ConflictError where the plan contradicts earlier changes.
    """
    planned, build.planned = build.planned, None
    if planned is None:
        return
    values: list[tuple[Feature[Any], Any]] = [(RECOMPUTE, planned.recompute), (SWAP, planned.swap)]
    if planned.chunked_loss is not None:
        values.append((CHUNKED_LOSS, planned.chunked_loss))
    found = [Declaration(feature.key, Phase.PLANNED, list(feature.declare(value, build))) for feature, value in values]
    check_declarations(build.model, found, build.declared)
    for declaration in found:
        declaration.apply()
    build.declared += found


def declare_parts(features: Values, build: Build) -> list[Declaration]:
    """The parts of the engine that ``features`` provide."""
    with _plan_errors_say_what_works(build):
        found = [
            Declaration(feature.key, Phase.ENGINE, list(feature.parts(value, build))) for feature, value in features
        ]
    return [each for each in found if each.changes]


def declare(features: Values, build: Build) -> list[Declaration]:
    """Declare the changes that ``features`` will make to the model of ``build``, in the order of application.

    The model is only read. A feature that has changed it before declares nothing; raises ValueError where it did so for
    another value.
    """
    before = changed_for(build.model)
    found = []
    for feature, value in features:
        asked = feature.asked(value, build)
        if feature.key not in before:
            with _plan_errors_say_what_works(build):
                changes = list(feature.declare(value, build))
            found.append(Declaration(feature.key, feature.phase, changes))
        elif asked != before[feature.key]:
            raise ValueError(
                f"ds_npu.{feature.key}: the {type(build.model).__name__} was changed for {before[feature.key]}, and "
                f"this config asks for {asked or 'nothing of it'}. What to do: the same config for from_pretrained "
                "and every engine of a model, or a model of its own for this engine"
            )
        else:
            build.notes.append(f"{feature.key}: the model has been changed for {asked} before, and is left as it is")
    return sorted((each for each in found if each.changes), key=lambda each: each.phase)


@contextmanager
def _plan_errors_say_what_works(build: Build) -> Iterator[None]:
    try:
        yield
    except PlanError as error:
        with suppress(PlanError):
            # Wrong globs are an error with or without a plan.
            build.partial_plan  # noqa: B018
            works = filter(None, (feature.without_plan(build) for feature in FEATURES))
            error.works = "; ".join(["Data parallelism and ZeRO work without a plan", *works]) + "."
        raise


def changed_for(model: nn.Module) -> dict[str, str]:
    """Per key, what ``model``, or a model that it has wrapped since (PEFT), was changed for."""
    return dict(next(filter(None, map(CHANGED_FOR.get, model.modules())), {}))
