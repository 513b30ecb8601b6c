"""``ds_npu.recompute``: activations computed again in backward instead of kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from ds_npu.config.recompute import RecomputeSection
from ds_npu.config.roles import Role
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change, Phase, wrap_by_name
from ds_npu.features.modules.matched_modules import matched_modules, no_module_is
from ds_npu.features.recompute.attention_core import attention_changes
from ds_npu.features.recompute.budget import plan_part
from ds_npu.features.recompute.outputs import (
    COLUMNS,
    LAST,
    RecomputedActivation,
    RecomputedNorm,
    children,
    mlp_linears,
    without_kept_outputs,
)
from ds_npu.features.recompute.recomputed_calls import KEY, RecomputedRuns, check_not_checkpointed, recompute_module
from ds_npu.models import names
from ds_npu.parallel.pipeline.pass_through import stages_in
from ds_npu.parallel.runtime.forward_wraps import Level, Wrapper
from ds_npu.planner.memory_plan import missing_solver

NORMS = (Role.NORM, Role.HEAD_NORM, Role.FINAL_NORM)
MLPS = (Role.MLP,)


def _asked(section: RecomputeSection, build: Build) -> str:
    fields = type(section).model_fields
    return ", ".join(f"{key} {value}" for key, value in section if value != fields[key].default)


def _declare(section: RecomputeSection, build: Build) -> Iterable[Change]:
    if not _asked(section, build):
        return
    if build.is_pipeline:
        raise ValueError(
            f"ds_npu.{KEY}: found for a deepspeed.PipelineModule. What to do: leave it out, and give the module an "
            "activation_checkpoint_interval"
        )
    check_not_checkpointed(build.model)
    if section.budget_gib is not None and not build.block_plan.blocks and not build.is_cut_into_stages:
        raise ValueError(f"ds_npu.{KEY}.budget_gib: {no_module_is(Role.BLOCK, build.model)}")
    whole = _blocks(section, build) if section.layers != "none" else []
    yield from _runs(section, build, whole)
    for name in _globbed(section, build, whole):
        whole = [*whole, name]
        yield _wrap_whole(section, build, name)
    if section.attention_core:
        yield from attention_changes(build, whole)
    if section.norm or section.activation_function:
        yield from _outputs(section, build, whole)


def _wrap(build: Build, name: str, what: str, wrapper: Wrapper) -> Change:
    return wrap_by_name(build.model, name, what, wrapper, Level.RECOMPUTE)


def _wrap_whole(section: RecomputeSection, build: Build, name: str) -> Change:
    wrapper = partial(recompute_module, build.device_type, section.keep)
    return _wrap(build, name, "computed again in backward", wrapper)


def _blocks(section: RecomputeSection, build: Build) -> list[str]:
    blocks, found = build.block_plan.blocks, section.layers
    first = found if isinstance(found, int) and section.method == "block" else len(blocks)
    # A pipeline stage may have fewer than others, or none.
    if not build.is_cut_into_stages and not blocks:
        raise ValueError(f"ds_npu.{KEY}.layers: found {found}; {no_module_is(Role.BLOCK, build.model)}")
    if not build.is_cut_into_stages and first > len(blocks):
        raise ValueError(
            f"ds_npu.{KEY}.layers: found {found}; {build.block_plan.model} has {len(blocks)}: at most so many, or 'all'"
        )
    return list(blocks[:first])


def _runs(section: RecomputeSection, build: Build, blocks: Sequence[str]) -> Iterator[Change]:
    """Wrap blocks that are recomputed one by one, or in runs."""
    if section.method != "uniform" or section.layers == 1:
        for name in blocks:
            yield _wrap_whole(section, build, name)
        return
    assert isinstance(section.layers, int)
    runs = RecomputedRuns(section.layers, build.device_type, section.keep)
    owners = {names.parent(names.parent(name)) for name in blocks}
    for name in sorted(owners):
        yield _wrap(build, name, "ends a run of layers", runs.around)
    for name in blocks:
        what = f"computed again in backward, {section.layers} together"
        yield _wrap(build, name, what, partial(runs.block, name == blocks[-1]))


def _globbed(section: RecomputeSection, build: Build, whole: Sequence[str]) -> list[str]:
    """The modules that the globs match, except those inside other matches or recomputed layers."""
    found = _matched("modules", section.modules, build)
    outside = [name for name in found if not _is_inside_any(name, whole)]
    return [
        name for name in dict.fromkeys(outside) if not _is_inside_any(name, [each for each in outside if each != name])
    ]


def _matched(key: str, globs: bool | Sequence[str], build: Build) -> list[str]:
    """The modules of this rank that ``globs`` match; for true "", the model itself."""
    if isinstance(globs, bool):
        return [""] if globs else []
    return [name for glob in globs for name in matched_modules(f"{KEY}.{key}", glob, build.model)]


def _is_inside_any(name: str, others: Iterable[str]) -> bool:
    return any(names.is_inside(name, other) for other in others)


def _outputs(section: RecomputeSection, build: Build, whole: Sequence[str]) -> Iterator[Change]:
    """Wraps that recompute norms and activation functions outside of modules that are recomputed as a whole."""
    plan = build.block_plan

    def chosen(key: str, globs: bool | Sequence[str], *roles: Role) -> list[str]:
        around = _matched(key, globs, build)
        return [each for each in plan.named(*roles) if _is_inside_any(each, around) and not _is_inside_any(each, whole)]

    norms = chosen("norm", section.norm, *NORMS)
    mlps = chosen("activation_function", section.activation_function, *MLPS)
    for name in plan.blocks:
        if not _is_inside_any(name, whole) and any(names.is_inside(each, name) for each in (*norms, *mlps)):
            what = "outputs of norms and activation functions are not kept"
            yield _wrap(build, name, what, without_kept_outputs)
    for name in norms:
        yield _wrap(build, name, "computed again in backward, its output too", RecomputedNorm(build.device_type))
    for name in mlps:
        yield from _activation(build, name)


def _activation(build: Build, mlp: str) -> Iterator[Change]:
    linears = mlp_linears(build.block_plan, mlp)
    if linears is None:
        first, last = (len(children(build.block_plan, mlp, *roles)) for roles in (COLUMNS, LAST))
        build.notes.append(f"{KEY}: {mlp} keeps its activations: {first} first linears, {last} last ones")
        return
    columns, down = linears

    def make() -> None:
        RecomputedActivation(build.model.get_submodule(mlp), columns, down, build.device_type).wrap()

    yield Change("wraps", mlp, "its activation function is computed again", make, Level.RECOMPUTE)
    for name in columns:
        yield Change("wraps", f"{mlp}.{name}", "its output is kept", None, Level.RECOMPUTE)
    yield Change("wraps", f"{mlp}.{down}", "its input is not kept", None, Level.RECOMPUTE)


def _check_roles(section: RecomputeSection, build: Build) -> None:
    """Raise ValueError where a model that is not cut into stages has no module for a key."""
    plan = build.block_plan
    keys = ("norm", section.norm, NORMS), ("activation_function", section.activation_function, MLPS)
    for key, globs, roles in keys:
        if globs and not plan.named(*roles):
            experts = "; for experts ds_npu.moe.zero_memory" if roles is MLPS and plan.named(Role.EXPERTS) else ""
            raise ValueError(f"ds_npu.{KEY}.{key}: found {globs}; {no_module_is(roles[0], build.model)}{experts}")


def _parts(section: RecomputeSection, build: Build) -> Iterable[Change]:
    if (section.norm or section.activation_function) and not (build.is_pipeline or stages_in(build.model)):
        _check_roles(section, build)
    yield from plan_part(section, build)


def _unmet(section: RecomputeSection) -> list[str]:
    return missing_solver() if section.budget_gib is not None else []


RECOMPUTE: Feature[RecomputeSection] = Feature(
    KEY, Phase.WRAPS, declare=_declare, parts=_parts, asked=_asked, unmet=_unmet
)
