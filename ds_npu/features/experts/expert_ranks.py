"""``ds_npu.moe``: shards the experts of a build's model over the ranks of the expert view, and computes them there."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ds_npu.config.moe import DEFAULT_DISPATCHER, MoeSection
from ds_npu.config.problems import ConfigError, Problem
from ds_npu.config.sections import switched_on
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change, Phase
from ds_npu.features.experts.adapters import adapter_changes
from ds_npu.features.experts.balance import balance_changes
from ds_npu.features.experts.capacity import CapacityLimit, agrees_on_tokens
from ds_npu.features.experts.layer import ExpertLayer, compute_experts_at_once
from ds_npu.features.experts.load import load_parts
from ds_npu.features.experts.presized import PresizedForward, presized_changes
from ds_npu.features.experts.relocation import KEY, MAPPED_EXPERTS, install_relocation
from ds_npu.features.experts.shared_experts import shared_call, shared_changes
from ds_npu.features.modules.expert_layout import ExpertLayout, Layout, expert_layouts, expert_shard
from ds_npu.features.modules.listed_experts import ListedLayout, looped_over
from ds_npu.features.modules.scaled_inputs import compute_scaled, route_to_chosen
from ds_npu.models import kinds, names
from ds_npu.models.attributes import set_attribute
from ds_npu.models.guards import check_not_compiled, refuse_compiling, refuse_saving_shards
from ds_npu.models.hugging_face_model import config_of, hugging_face_model, is_hugging_face, setting
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.dispatch import ExpertOptions
from ds_npu.parallel.expert.expert_map import MappedExperts, plain_map
from ds_npu.parallel.expert.experts import DISPATCHERS
from ds_npu.parallel.expert.overlap import SharedExperts, compute_experts_in_halves, compute_experts_with_shared
from ds_npu.parallel.pipeline.pass_through import stages_in
from ds_npu.parallel.runtime.forward_wraps import R
from ds_npu.parallel.runtime.marks import Mark
from ds_npu.parallel.runtime.placement import has_experts
from ds_npu.topology.topology import Topology

EXPERTS_INSTALLED: Mark[bool] = Mark("experts")
"""Marks a model whose experts ds_npu computes."""
GENERATE, SYNCED = "generate", "synced_gpus"
BFLOAT16_BYTES = 2


def _applies(section: MoeSection, build: Build) -> bool:
    return build.topology.size("ep", "etp") > 1 or section.computes


def _asked(section: MoeSection, build: Build) -> str:
    if not _applies(section, build) and not section.has_losses:
        return ""
    sizes = f"expert {build.topology.size('ep')}, expert_tensor {build.topology.size('etp')}"
    return sizes + "".join(f", {key} {value}" for key, value in switched_on(section))


def _declare(section: MoeSection, build: Build) -> Iterable[Change]:
    computes = _applies(section, build) and not _has_experts_installed(build.model)
    if not computes and not section.has_losses:
        return []
    check_not_compiled(build.model, "expert")
    layouts = expert_layouts(build.model, build.partial_plan)
    # A pipeline stage may have no experts: the whole model was checked before it was cut.
    if not layouts and not stages_in(build.model):
        raise ValueError(_nowhere(build.model))
    balance = list(balance_changes(section, build, layouts))
    if not computes:
        return balance
    _check(layouts, build.topology)
    _check_choices(build.model, layouts)
    build.notes += traffic(section, build, layouts)
    axis = ExpertAxis.of(build.topology, build.sequence_parallel)
    return [*_changes(section, build, layouts, axis), *balance]


def _has_experts_installed(model: nn.Module) -> bool:
    """Whether ds_npu computes the experts of ``model`` already, as it may in a user's own layers."""
    return has_experts(model) or any(map(EXPERTS_INSTALLED.get, model.modules()))


def _changes(section: MoeSection, build: Build, layouts: dict[str, Layout], axis: ExpertAxis) -> Iterator[Change]:
    dispatcher = (section.dispatching.padded if section.pad_to_capacity else section.dispatcher) or DEFAULT_DISPATCHER
    options = ExpertOptions(dispatcher, section.zero_memory, section.replica_rows)
    presized = None
    if section.row_margin is not None and axis.size > 1:
        presized = PresizedForward(build.model, list(layouts), section.row_margin, build.topology)
        yield from presized_changes(build.model, list(layouts), presized)
    for name, layout in layouts.items():
        module = build.model.get_submodule(name)
        mapped = MappedExperts(plain_map(layout.count, axis.ep)) if section.placement_interval else None
        if isinstance(layout, ListedLayout) and (mapped is not None or section.replica_rows):
            key = KEY if mapped is not None else "ds_npu.moe.replica_rows"
            raise ValueError(
                f"{key}: {name} holds its experts in a list, whose weights do not move. What to do: {key} 0"
            )
        if axis.size > 1:
            for leaf in layout.names:
                shardings = layout.shardings(leaf, build.topology.size("ep"), build.topology.size("etp"))
                yield expert_shard(f"{name}.{leaf}".lstrip("."), module.get_parameter(leaf), shardings, build.topology)
            adapters = list(adapter_changes(build.model, name, layout, build.topology))
            if adapters and mapped is not None:
                raise ValueError(f"{KEY}: {name} has an adapter, whose factors do not move. What to do: {KEY} 0")
            yield from adapters
        if mapped is not None:
            yield Change("sets", name, MAPPED_EXPERTS.name, partial(MAPPED_EXPERTS.set, module, mapped))
        run, how, changes = _run(section, build, name)
        yield from changes
        presize = None if presized is None else partial(presized.plans, name)
        run = partial(run, axis=axis, options=replace(options, presize=presize))
        if isinstance(layout, ExpertLayout) and layout.scales_inputs:
            make = partial(route_to_chosen, build.model, name)
            yield Change("computes", names.owner(name), "gives experts the tokens that chose them", make)
            run = partial(compute_scaled, run)
        capacity = CapacityLimit.of(section, layout.count, name)
        text = _described(axis, options) + how + ("" if capacity is None else f", {capacity}")
        layer = ExpertLayer(layout, axis, run, mapped, capacity)
        yield Change("computes", name, text, partial(layer.compute_in, module))
    if section.pad_to_capacity and axis.size > 1:
        yield agrees_on_tokens(build.model)
    sets = ", ".join([EXPERTS_INSTALLED.name, "compile", "__deepcopy__", "save_pretrained", GENERATE])
    yield Change("sets", "", sets, partial(_finish, build.model, axis))


def _run(section: MoeSection, build: Build, name: str) -> tuple[Callable[..., torch.Tensor], str, Iterable[Change]]:
    """The function that the experts ``name`` run, given axis and options; its description; further changes."""
    if not section.overlap:
        return compute_experts_at_once, "", ()
    call = shared_call(build.model, name)
    if call is None:
        return compute_experts_in_halves, ", in two halves", ()
    shared = SharedExperts(call.shared, call.of_block_input, partial(build.model.get_submodule, call.shared))
    run = partial(compute_experts_with_shared, shared=shared)
    return run, f", beside {call.shared.rpartition('.')[2]}", shared_changes(build.model, call, shared)


def _finish(model: nn.Module, axis: ExpertAxis) -> None:
    EXPERTS_INSTALLED.set(model, True)
    if axis.size > 1:
        generate_synced(model)
    refuse_compiling(model, "expert")
    refuse_saving_shards(model)


def _described(axis: ExpertAxis, options: ExpertOptions) -> str:
    where = f"experts over {axis.size} ranks by {options.dispatcher}" if axis.size > 1 else "experts"
    level = "" if options.zero_memory == "none" else f", zero memory {options.zero_memory}"
    shared = f", replicas for {options.replica_rows} rows or more" if options.replica_rows else ""
    return f"{where}, grouped{level}{shared}"


def _check(layouts: dict[str, Layout], topology: Topology) -> None:
    """Raise ConfigError that names every module whose experts cannot be sharded over these ranks."""
    ep, etp = topology.size("ep"), topology.size("etp")
    problems = []
    for name, layout in layouts.items():
        if layout.count % ep:
            accepted = f"a divisor of the {layout.count} experts of {names.generic(name)}"
            problems.append(Problem("ds_npu.parallel.expert", ep, accepted))
        if etp > 1 and isinstance(layout, ListedLayout) and layout.has_bias:
            accepted = f"1: the listed experts of {names.generic(name)} have biases; use ds_npu.parallel.expert"
            problems.append(Problem("ds_npu.parallel.expert_tensor", etp, accepted))
        elif etp > layout.width:
            accepted = f"at most {layout.width}, the columns of an expert of {names.generic(name)}"
            problems.append(Problem("ds_npu.parallel.expert_tensor", etp, accepted))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _check_choices(model: nn.Module, layouts: dict[str, Layout]) -> None:
    """Raise ValueError where a token is given more experts than a layer has, or some that have no weights."""
    found = hugging_face_model(model)
    choices = None if found is None else setting(found.config.get_text_config(), "num_experts_per_tok", int)
    for name, layout in layouts.items():
        if choices is not None and choices > layout.count:
            raise ValueError(
                f"num_experts_per_tok in the config of {type(model).__name__}: found {choices}; at most "
                f"{layout.count}, the experts of {names.generic(name)}"
            )
        shapes = kinds.own_shapes(model.get_submodule(name))
        counts = {leaf: shape[0] for leaf, shape in shapes.items() if len(shape) == 3}
        if len({layout.count, *counts.values()}) > 1:
            found_counts = ", ".join(f"{leaf} {count}" for leaf, count in counts.items())
            raise ValueError(
                f"ds_npu.parallel.expert: {names.generic(name)} has weights of different numbers of experts "
                f"({found_counts}): some have none of their own, as those of LongCat-Flash that are the identity. What "
                'to do: expert 1 and expert_tensor 1 and no "moe"'
            )


def _nowhere(model: nn.Module) -> str:
    lists = ", ".join(dict.fromkeys(looped_over(model)))
    own = f"; it has {lists}: move the loop into a module of its own (docs/experts.md has one)" if lists else ""
    return (
        f"ds_npu.parallel.expert: {type(model).__name__} has no module of experts that ds_npu knows: one of "
        f"transformers 5, whose forward takes tokens, their experts and their routing weights{own}. What to do: "
        'expert 1 and expert_tensor 1 and no "moe"; or give your own module of that kind the role experts in '
        "ds_npu.plan"
    )


def _parts(section: MoeSection, build: Build) -> Iterable[Change]:
    is_whole = not stages_in(build.model) and not _has_experts_installed(build.model)
    if _asked(section, build) and is_whole and not expert_layouts(build.model, build.partial_plan):
        raise ValueError(_nowhere(build.model))
    if interval := section.placement_interval:
        what = f"experts move by their load every {interval} steps"
        yield build.installed("relocation", what, partial(install_relocation, interval))
    yield from load_parts(section, build, computes=_applies(section, build))


def _without_plan(build: Build) -> str:
    try:
        known = bool(expert_layouts(build.model, build.partial_plan))
    except ValueError:
        known = False
    return "expert parallelism works" if known else ""


def _unmet(section: MoeSection) -> list[str]:
    reason = None if section.dispatcher is None else DISPATCHERS[section.dispatcher].unavailable()
    return [f"dispatcher {section.dispatcher!r}: its kernels are not available: {reason}"] if reason else []


def generate_synced(model: nn.Module) -> None:
    """Make ``generate`` of transformers' models within ``model`` call forward equally often on all ranks.

    A rank whose sequences have ended still computes experts for other ranks' tokens. transformers does that for ZeRO-3
    (``synced_gpus``), and the Trainer switches it off elsewhere.
    """
    for module in model.modules():
        found: Callable[..., object] | None = getattr(module, GENERATE, None)
        if is_hugging_face(module) and found is not None and SYNCED in inspect.signature(found).parameters:
            set_attribute(module, GENERATE, partial(_synced, found))


def _synced(generate: Callable[..., R], *args: object, **kwargs: object) -> R:
    given = inspect.signature(generate).bind(*args, **kwargs)
    given.arguments[SYNCED] = True
    return generate(*given.args, **given.kwargs)


def rows_away(experts: int, choices: int, ep: int, etp: int = 1) -> float:
    """The mean number of other ranks that a token goes to, once to each, over all choices and ranks."""
    not_there = math.comb(experts - experts // ep, choices) / math.comb(experts, choices)
    return (ep * etp - 1) * (1 - not_there)


def traffic(section: MoeSection, build: Build, layouts: dict[str, Layout]) -> list[str]:
    """Lines for people, one for each kind of layer; none where nothing is sent, or the choices are not known."""
    ep = build.topology.size("ep")
    etp = build.topology.size("etp")
    config = config_of(build.model)
    choices = None if config is None else setting(config.get_text_config(), "num_experts_per_tok", int)
    if ep * etp == 1 or choices is None:
        return []
    lines = []
    for name, layout in layouts.items():
        if choices > layout.count:
            continue
        if section.dispatching.sends_to == "all ranks":
            rows: float = ep * etp - 1
        elif section.pad_to_capacity and section.capacity_factor is not None:
            rows = section.capacity_factor * choices * etp * (1 - 1 / (ep * etp))
        elif section.dispatching.sends_to == "experts":
            rows = choices * etp * (1 - 1 / (ep * etp))
        else:
            rows = rows_away(layout.count, choices, ep, etp)
        size = rows * layout.hidden * BFLOAT16_BYTES
        lines.append(
            f"moe: {names.generic(name)} sends a token to {rows:.2f} other ranks and back, where experts are chosen "
            f"equally often: {size:,.0f} bytes each way in bfloat16, in forward and in backward"
        )
    return list(dict.fromkeys(lines))


MOE: Feature[MoeSection] = Feature(
    "moe", Phase.SHARDS, declare=_declare, parts=_parts, asked=_asked, without_plan=_without_plan, unmet=_unmet
)
