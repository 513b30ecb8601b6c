"""``ds_npu.swap``: activations that wait for backward in host memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ds_npu import capability
from ds_npu.config.roles import Role
from ds_npu.config.swap import SwapSection
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change, Phase, wrap_by_name
from ds_npu.features.modules.matched_modules import matched_modules, no_module_is
from ds_npu.memory.swapped_activations import SWAPPED_FORWARD, ActivationSwap
from ds_npu.models import names
from ds_npu.ops import exponent_code
from ds_npu.parallel.runtime.forward_wraps import Level, P, R, first_parameter_name, wrap_forward
from ds_npu.parallel.runtime.micro_batch import new_forward, running
from ds_npu.planner.swap_pattern import stage_ends

KEY, COMPRESS = "swap.activations", "swap.compress"


def _declare(section: SwapSection, build: Build) -> Iterable[Change]:
    if not section.activations:
        return
    if build.is_pipeline:
        raise ValueError(
            f"ds_npu.{KEY}: found for a deepspeed.PipelineModule. What to do: leave it out, and give the module an "
            "activation_checkpoint_interval; or a model of transformers, with ds_npu.parallel.pipeline"
        )
    if section.activations is True and not build.block_plan.blocks and not build.is_cut_into_stages:
        raise ValueError(f"ds_npu.{KEY}: found true; {no_module_is(Role.BLOCK, build.model)}")
    chosen = list(build.block_plan.blocks) if section.activations is True else _globbed(section, build.model)
    # A pipeline stage may have no blocks.
    if len(chosen) < 2 and not build.is_cut_into_stages:
        raise ValueError(
            f"ds_npu.{KEY}: found {section.activations}, which is {len(chosen)} of the modules of "
            f"{type(build.model).__name__}; at least 2: the last one stays on the device"
        )
    checked = section.compress and build.device_type == "npu" and not build.is_planned
    if checked and (reason := exponent_code.why_wrong_codes(build.device_type)):
        raise ValueError(
            f"ds_npu.{COMPRESS}: found true, and npu_hans_encode and npu_hans_decode do not work here: {reason}. "
            "What to do: leave it out"
        )
    ends = stage_ends(chosen, build.block_plan.stages if build.is_cut_into_stages else ())
    waiting = build.waiting_forwards or (1,) * build.topology.size("pp")
    share = waiting[build.topology.rank("pp")] / max(waiting)
    swap = ActivationSwap(build.device_type, ends, section.hidden_only, section.depth, section.compress, share)
    make = partial(wrap_forward, build.model, partial(_model, build.model, swap), Level.SWAP)
    yield Change("wraps", "", "what some modules save for backward waits on the host", make, Level.SWAP)
    for index, name in enumerate(chosen):
        what = "what it saves stays" if index + 1 in ends else "what it saves waits on the host"
        yield wrap_by_name(build.model, name, what, partial(_module, index), Level.SWAP)


def _globbed(section: SwapSection, model: nn.Module) -> list[str]:
    """The modules that the globs match, in the model's order, except those inside other matches."""
    assert isinstance(section.activations, list)
    chosen = {name for glob in section.activations for name in matched_modules(KEY, glob, model)}
    found = [name for name, _ in model.named_modules() if name in chosen]
    return [name for name in found if not any(names.is_inside(name, other) for other in found if other != name)]


def _model(model: nn.Module, swap: ActivationSwap, forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    if not (model.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    swapped = swap.begin()
    with new_forward() as micro_batch, saved_tensors_hooks(swapped.hold, lambda held: held.get()):
        SWAPPED_FORWARD.set(micro_batch, swapped)
        out = forward(*args, **kwargs)
    swapped.close()
    return out


def _module(index: int, module: nn.Module, forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Wrap a chosen module's forward: what it saves is swapped, but not weights and arguments behind the first."""
    swapped = SWAPPED_FORWARD.of(running())
    if swapped is None:
        return forward(*args, **kwargs)
    first = () if args else (first_parameter_name(module),)
    others = args[1:], {name: value for name, value in kwargs.items() if name not in first}
    kept = [each for each in tree_leaves(others) if isinstance(each, torch.Tensor)]
    with swapped.call(index, [*kept, *module.parameters()]):
        return forward(*args, **kwargs)


def _asked(section: SwapSection, build: Build) -> str:
    hidden = ", as much as is hidden" if section.hidden_only else ""
    depth = "" if section.depth is None else f", copied back {section.depth} ahead"
    codes = ", compressed" if section.compress else ""
    return f"{KEY} {section.activations}{hidden}{depth}{codes}" if section.activations else ""


def _unmet(section: SwapSection) -> list[str]:
    # The CPU computes the code by a formula.
    if not section.compress or os.environ.get("DS_ACCELERATOR") == "cpu" or not capability.torch_npu_state().usable:
        return []
    reason = exponent_code.why_no_codes()
    return [f"compress: {reason}"] if reason else []


SWAP: Feature[SwapSection] = Feature("swap", Phase.WRAPS, declare=_declare, asked=_asked, unmet=_unmet)
