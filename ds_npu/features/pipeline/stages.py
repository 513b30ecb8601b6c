"""Cuts a model into pipeline stages: each rank along pp keeps a part of the layers, at their own names.

    stages = stages_of(plan, 2)                        # pure: what each stage holds
    cut_into_stages(model, plan, stages[rank])         # absent modules become pass-throughs
    out = run_stage(model, stages[rank].stage, arrived, input_ids=...)

A rank may have several stages. A model is planned, then cut, then sharded. PEFT may add its adapters before or after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.build import MODEL_PLAN
from ds_npu.features.loss.model_loss import FUSED_HEAD
from ds_npu.features.pipeline.images import check_images, link_deep_stack, without_pixels
from ds_npu.models import kinds, names
from ds_npu.models.attributes import attributes, set_attribute
from ds_npu.models.guards import check_before_saving
from ds_npu.models.hugging_face_model import hugging_face_model, is_hugging_face, setting
from ds_npu.models.logits import LABEL_ARGUMENTS
from ds_npu.models.plan import ModelPlan
from ds_npu.models.zero3 import is_partitioned
from ds_npu.parallel.pipeline.pass_through import (
    TIED_APART,
    OwnStages,
    PassThrough,
    Side,
    Stage,
    absent_weights,
    crossing,
    follow_block,
    stages_in,
)
from ds_npu.parallel.pipeline.transfers import Tensors
from ds_npu.parallel.runtime.calls import Keywords
from ds_npu.parallel.runtime.marks import Mark
from ds_npu.parallel.runtime.placement import Placement, placement_of

FIRST = (Role.EMBEDDING, Role.POSITION_EMBEDDING, Role.NORM)
"""Roles of modules outside of blocks that the first stage holds: all before the first block."""
LAST = (Role.FINAL_NORM, Role.HEAD)
OF_ALL_LAYERS = ("output_router_logits", "output_attentions", "output_hidden_states")
"""Settings, and arguments of a forward, with which a model returns, or adds to its loss, something of every layer."""
UNSERVED = dict.fromkeys(OF_ALL_LAYERS, "a stage has a part of the layers") | {
    "past_key_values": "stages keep no caches"
}
"""Arguments of a forward that no stage can serve, and why."""
OWN_STAGES: Mark[OwnStages] = Mark("own stages")
"""The stages of a model that is cut into stages."""


@dataclass(frozen=True)
class StageModules:
    """The modules of one stage; modules that are in none of the lists are in every stage."""

    stage: Stage
    blocks: tuple[str, ...]
    absent: Mapping[str, Side]
    """Modules of other stages, in the model's order."""


def stages_of(plan: ModelPlan, split: int | Sequence[int]) -> list[StageModules]:
    """The modules of each stage; ``split``: how many stages, as even as possible, or the number of blocks of each.

    The first stage also holds embeddings and what stands before the blocks, the last one final norm and head. Raises
    ValueError where the numbers do not add up, and for a module whose stage is not known.
    """
    counts = _counts(plan, split)
    if len(counts) == 1:
        return [StageModules(Stage(0, 1, len(plan.blocks)), plan.blocks, {})]
    first, inputs, last = _around_blocks(plan)
    every = list(plan.roles)
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    found = []
    for index, end in enumerate(ends):
        begin = end - counts[index]
        sides = dict.fromkeys(map(_outermost, plan.blocks[:begin]), Side.BEFORE)
        sides |= dict.fromkeys(map(_outermost, plan.blocks[end:]), Side.AFTER)
        if index > 0:
            sides |= dict.fromkeys(first, Side.EMBEDDING) | dict.fromkeys(inputs, Side.INPUTS)
        if index < len(counts) - 1:
            sides |= dict.fromkeys(last, Side.AFTER)
        position = {name: next(at for at, each in enumerate(every) if names.is_inside(each, name)) for name in sides}
        absent = {name: sides[name] for name in sorted(sides, key=position.__getitem__)}
        stage = Stage(index, len(counts), counts[index], begin, behind=sum(counts) - end)
        found.append(StageModules(stage, plan.blocks[begin:end], absent))
    return found


def _counts(plan: ModelPlan, split: int | Sequence[int]) -> list[int]:
    """The number of blocks of each stage; in an even split the earlier stages are the longer."""
    total = len(plan.blocks)
    if isinstance(split, int):
        if not 1 <= split <= max(total, 1):
            raise ValueError(f"{plan.model} has {total} blocks; found {split} stages, of which each needs a block")
        short, longer = divmod(total, split)
        return [short + (index < longer) for index in range(split)]
    if sum(split) != total or min(split, default=-1) < 0:
        raise ValueError(f"{plan.model} has {total} blocks; found stages of {', '.join(map(str, split)) or 'none'}")
    if not split[0]:
        raise ValueError(
            f"{plan.model}: found no block in the first stage, which computes all that stands before the first block. "
            "What to do: give it one"
        )
    return list(split)


def _around_blocks(plan: ModelPlan) -> tuple[list[str], list[str], list[str]]:
    """Modules outside of blocks: those before the blocks, those for other inputs, those behind the blocks."""
    first: dict[str, None] = {}
    inputs: dict[str, None] = {}
    last: dict[str, None] = {}
    unknown: list[str] = []
    has_blocks_before = False
    for name, role in plan.roles.items():
        has_blocks_before |= role is Role.BLOCK
        if role in (Role.BLOCK, Role.ROTARY, Role.LORA_A, Role.LORA_B) or plan.block(name) is not None:
            continue
        # Inkling's embedding holds a norm.
        if any(names.is_inside(name, each) for each in (*first, *inputs, *last)):
            continue
        if role in FIRST:
            first[_outermost(name)] = None
        elif role in LAST:
            last[_outermost(name)] = None
        elif (
            role is Role.REPLICATED
            and (plan.head is not None or not has_blocks_before)
            and (alone := _without_other_roles(plan, name))
        ):
            # Its stand-in notices where the model calls it elsewhere than it stands.
            (last if has_blocks_before else inputs)[alone] = None
        else:
            unknown.append(f"{name} ({role})")
    if unknown:
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        raise ValueError(
            f"{plan.model}: nothing says which pipeline stage holds {', '.join(unknown[:4])}{more}. What to do: one "
            "stage, or in ds_npu.plan a role of the embedding, of a block, or of final norm and head"
        )
    return list(first), list(inputs), list(last)


def _outermost(name: str) -> str:
    """The outermost module with the plain name of ``name``: PEFT puts its layers around others."""
    alike = [each for each in names.ancestors(name) if names.plain(each) == names.plain(name)]
    return alike[-1] if alike else name


def _without_other_roles(plan: ModelPlan, name: str) -> str | None:
    """The outermost module that is or holds ``name`` and is all replicated (a vision tower); None without one."""
    around = [name, *filter(None, names.ancestors(name))]
    alone = [each for each in around if all(plan.roles[inner] is Role.REPLICATED for inner in plan.inside(each))]
    alone = [each for each in alone if plan.of(each) in (None, Role.REPLICATED)]
    return alone[-1] if alone else None


def cut_into_stages(model: nn.Module, plan: ModelPlan, *own: StageModules) -> None:
    """Cut ``model`` to the stages ``own``, in place: modules of all other stages become pass-throughs.

    ``plan`` is the plan of ``model``, which keeps the part of it for these stages. Embedding and head that share one
    weight keep it, each in its stage. Raises ValueError, before anything is changed, for a model that is cut, sharded
    or in an engine already; that has weights that the plan does not know, or another weight in two stages; or that
    returns something of every layer.
    """
    _check_cuttable(model, plan, own)
    if own[0].stage.count == 1:
        return
    own = tuple(_without_weightless_norms(model, each) for each in own)
    held = OwnStages([each.stage for each in own], _tied_names(model, plan) if plan.tied else None)
    outside = {name: None for each in own for name in each.absent}
    for name in outside:
        parent = model.get_submodule(names.parent(name))
        leaf = name.rpartition(".")[2]
        sides = {each.stage.index: each.absent[name] for each in own if name in each.absent}
        passing = _passing(model.get_submodule(name), name, sides, held)
        if len(sides) == len(own):
            parent.add_module(leaf, passing)
        else:
            held.add(parent, leaf, passing)
    for each in own:
        for name in each.blocks:
            follow_block(model.get_submodule(name), name)
    link_deep_stack(model)
    mine = plan.without([name for name in outside if all(name in each.absent for each in own)])
    if len(own) > 1:
        mine = replace(mine, stages=tuple(each.blocks for each in own if each.blocks))
    MODEL_PLAN.set(model, mine)
    OWN_STAGES.set(model, held)
    tied = held.tied or ()
    here = [weight for name, weight in model.named_parameters(remove_duplicate=False) if name in tied]
    if len(here) == 1:
        TIED_APART.set(here[0], True)
    refuse_saving_a_stage(model)


def _without_weightless_norms(model: nn.Module, own: StageModules) -> StageModules:
    """Keep norms without weights in the stage ``own``: a model may call one before and behind its blocks (nanochat).

    Not in a stage, except the last, that no block follows: the stand-in for the first module behind the blocks sends
    the hidden states.
    """
    if not own.stage.behind and own.stage.index < own.stage.count - 1:
        return own
    norms = {name for name in own.absent if kinds.is_norm(model.get_submodule(name))}
    free = {name for name in norms if not any(True for _ in model.get_submodule(name).parameters())}
    return replace(own, absent={name: side for name, side in own.absent.items() if name not in free})


def _passing(absent: nn.Module, name: str, sides: Mapping[int, Side], held: OwnStages) -> PassThrough:
    """A PassThrough for ``absent``, with those attributes (str and int) that models ask layers for."""
    passing = PassThrough(absent, name, sides, held)
    for key, value in (attributes(absent, str) | attributes(absent, int)).items():
        if not key.startswith("_") and not hasattr(passing, key):
            set_attribute(passing, key, value)
    return passing


def _tied_names(model: nn.Module, plan: ModelPlan) -> tuple[str, str]:
    embedding, head = plan.embedding, plan.head
    assert embedding is not None and head is not None, "they share a weight"
    shared = {id(each): name for name, each in model.get_submodule(embedding).named_parameters()}
    heads = [
        (shared[id(each)], name) for name, each in model.get_submodule(head).named_parameters() if id(each) in shared
    ]
    return f"{embedding}.{heads[0][0]}", f"{head}.{heads[0][1]}"


def _check_cuttable(model: nn.Module, plan: ModelPlan, own: Sequence[StageModules]) -> None:
    who = plan.model
    if stages_in(model):
        raise ValueError(f"{who} is {' and '.join(map(str, stages_in(model)))} already; cut the whole model")
    if any(placement_of(each) != Placement() or is_partitioned(each) for each in model.parameters()):
        raise ValueError(
            f"{who} is sharded, or in an engine, already. What to do: cut it into stages first, and then give it to "
            "deepspeed.initialize"
        )
    if own[0].stage.count == 1:
        return
    with_weights = [name for name, module in model.named_modules() if kinds.own_shapes(module)]
    unplaced = [name for name in with_weights if not {name, *names.ancestors(name)} & plan.roles.keys()]
    if unplaced:
        more = f" and {len(unplaced) - 4} more" if len(unplaced) > 4 else ""
        raise ValueError(
            f"{who}: nothing says which pipeline stage holds {', '.join(unplaced[:4])}{more}. What to do: give them a "
            "role in ds_npu.plan"
        )
    _check_shared_weights(model, plan, own)
    root = hugging_face_model(model)
    asked = [] if root is None else [key for key in OF_ALL_LAYERS if setting(root.config.get_text_config(), key, bool)]
    if asked:
        raise ValueError(
            f"{who}: {', '.join(asked)} in its config, and a stage has a part of the layers: what all of them "
            "return together comes with the pipeline. What to do: set it to false"
        )


def _check_shared_weights(model: nn.Module, plan: ModelPlan, own: Sequence[StageModules]) -> None:
    """Raise ValueError where modules of two stages share a weight; a head may share its embedding's."""
    tied = {plan.embedding, plan.head} if plan.tied else set()
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = owners.setdefault(id(parameter), name)
        apart = any(len({_side(each, name), _side(each, other)}) > 1 for each in own)
        if apart and not {names.owner(name), names.owner(other)} <= tied:
            raise ValueError(
                f"ds_npu.parallel.pipeline: {plan.model}: {other} and {name} are one weight in two pipeline stages. "
                "What to do: ds_npu.parallel.pipeline 1, or a ds_npu.pipeline.split that leaves both in one stage"
            )


def _side(own: StageModules, name: str) -> Side | None:
    return next((own.absent[each] for each in (name, *names.ancestors(name)) if each in own.absent), None)


def run_stage(
    model: nn.Module,
    stage: Stage,
    arrived: Tensors | None,
    losses: list[torch.Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    """Run one forward of ``model`` as ``stage`` on a batch; return the tensors for the next stage.

    These are the hidden states [B, S, H] (with sequence parallelism their shards, where blocks follow), and then the
    other tensors that later blocks take. The last stage returns the model's output. ``arrived``: the tensors of the
    stage before, None in the first stage; with context parallelism those of this rank's tokens. Every stage is given
    the whole batch by name; labels are used by the last stage only, pixels by the first. ``losses``: a list to which
    the losses of the stage's own layers are appended. Raises ValueError where ``arrived`` is missing, or given to the
    first stage, and for arguments that a stage cannot serve: caches, and requests for something of every layer.
    """
    if (arrived is None) != (stage.index == 0):
        raise ValueError(
            f"{type(model).__name__}: {stage} is given {'no' if arrived is None else 'some'} hidden states"
        )
    if stage.count > 1:
        check_arguments(model, kwargs)
    is_last = stage.index == stage.count - 1
    if not is_last:
        kwargs = {key: value for key, value in kwargs.items() if key not in (*LABEL_ARGUMENTS, FUSED_HEAD)}
    if stage.index > 0:
        kwargs = without_pixels(model, kwargs)
    # PEFT may have been put around the model that is cut.
    several = next(filter(None, map(OWN_STAGES.get, model.modules())), None)
    with nullcontext() if several is None else several.only(stage), crossing(stage, arrived) as states:
        out = model(**kwargs)
    if losses is not None:
        losses += states.losses
    if is_last:
        return out
    if states.leaving is None:
        raise RuntimeError(f"{type(model).__name__}: {stage} has returned before its blocks were behind it")
    return (states.leaving, *states.leaving_extra)


def check_arguments(model: nn.Module, given: Keywords) -> None:
    """Raise ValueError for arguments that no stage of ``model`` can serve."""
    refused = [key for key in UNSERVED if given.get(key)]
    if refused:
        raise ValueError(
            f"{type(model).__name__} is cut into stages, and is given {', '.join(refused)}: {UNSERVED[refused[0]]}. "
            "What to do: leave it out, or ds_npu.parallel.pipeline 1"
        )
    check_images(model, given)


@dataclass(frozen=True)
class _WholeCheck:
    """Refuses to write one stage's weights as if they were all."""

    model: str
    absent: tuple[str, ...]
    is_writable: bool
    """Whether a plain model can be made that writes the weights of all stages: for transformers' models, not PEFT's."""

    def __call__(self, folder: str, weights: Mapping[str, torch.Tensor] | None, is_main_process: bool) -> None:
        if not is_main_process:
            return
        if weights is not None and not self.is_writable:
            raise RuntimeError(
                f"save_pretrained({folder!r}): {self.model} writes what this stage has, whatever weights it is given. "
                "What to do: load engine.whole_state_dict(), or what engine.save_16bit_model(folder) writes, into the "
                "whole model, and save that"
            )
        missing = [name for name in self.absent if name not in (weights or {})]
        if missing:
            raise RuntimeError(
                f"save_pretrained({folder!r}) would write one stage's weights as if they were all, without "
                f"{missing[0]} and {len(missing) - 1} more. What to do: call engine.save_pretrained(folder), on every "
                "rank"
            )


def refuse_saving_a_stage(model: nn.Module) -> None:
    """Make ``model.save_pretrained`` raise RuntimeError where other stages hold weights that it is not given."""
    absent = tuple(absent_weights(model))
    if absent:
        check_before_saving(model, _WholeCheck(type(model).__name__, absent, is_hugging_face(model)))
