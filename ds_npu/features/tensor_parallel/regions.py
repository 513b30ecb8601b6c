"""The tensor-parallel regions of a model, and what sequence parallelism does to the modules around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial

from torch import nn

from ds_npu.config.roles import PARENT, Role
from ds_npu.features.declaration import Change
from ds_npu.features.modules.closing_checkpoint import recompute_in_micro_batch
from ds_npu.features.tensor_parallel.adapters import is_at_border, with_adapter
from ds_npu.features.tensor_parallel.experts import show_all_tokens
from ds_npu.features.tensor_parallel.role_shards import ROW_ROLES
from ds_npu.models import kinds, names
from ds_npu.models.hugging_face_model import config_of, has_setting, logits_index
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.pipeline.pass_through import Stage, stages_in
from ds_npu.parallel.runtime.forward_wraps import Level
from ds_npu.parallel.tensor.axis import TensorAxis
from ds_npu.parallel.tensor.linear import ColumnLinear, group_projections
from ds_npu.parallel.tensor.randomness import RegionRandomness, drops
from ds_npu.parallel.tensor.region import (
    RandomNumbers,
    begin_micro_batches,
    join_hidden_states,
    make_region,
    run_on_sequence_shards,
    run_on_whole_sequences,
)
from ds_npu.parallel.tensor.sequence_shards import SequenceParallel

REGION_ROLES = (Role.ATTENTION, Role.LINEAR_ATTENTION, Role.MLP)
"""Sublayers that are tensor-parallel regions; in an MoE layer, the experts and shared MLPs are regions."""
SHARDED_IN_REGIONS = (
    *(role for role, parents in PARENT.items() if parents[0] in REGION_ROLES),
    Role.EXPERTS,
    Role.COLUMN,
    Role.ROW,
)
SHARDED_ROLES = (*SHARDED_IN_REGIONS, Role.EMBEDDING, Role.HEAD)
JOINT_ROLES = ((Role.QUERY, Role.KEY, Role.VALUE), (Role.GATE, Role.UP), (Role.LINEAR_ATTENTION_INPUT,))
"""Roles of linears that a module calls with the same hidden states."""
LISTS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward of their own."""


def check_shardable(model: nn.Module, plan: ModelPlan, axis: TensorAxis) -> None:
    """Raise ValueError for regions that cannot be sharded.

    They hold a replicated module, a block or another region; the plan shards row linears only; or, with sequence
    parallelism, they stand outside of blocks.
    """
    for name in plan.named(Role.REPLICATED):
        region = plan.around(name, *REGION_ROLES)
        module = model.get_submodule(name)
        if region is not None and not kinds.is_norm(module):
            raise ValueError(
                f"{plan.model}: {name} is {Role.REPLICATED} and stands in {region}, whose role is "
                f"{plan.roles[region]}, where each tensor rank has heads or columns of its own. What to do: give "
                f"{names.generic(region)} the role {Role.REPLICATED} in ds_npu.plan, which holds for all in it"
            )
    for name in plan.named(*REGION_ROLES):
        held = plan.inside(name, Role.BLOCK, *REGION_ROLES)
        if held:
            raise ValueError(
                f"{plan.model}: {name} has the role {plan.roles[name]}, in which each tensor rank has heads or columns "
                f"of its own, and it holds {held[0]} ({plan.roles[held[0]]}), which is given whole hidden states. What "
                f"to do: leave {names.generic(name)} out of ds_npu.plan, or give it the role replicated"
            )
    rows = plan.named(*ROW_ROLES)
    if rows and set(plan.named(*SHARDED_IN_REGIONS)) <= set(rows):
        raise ValueError(
            f"{plan.model}: {rows[0]} is {plan.roles[rows[0]]}, over columns of which each tensor rank has some, and "
            "nothing makes them. What to do: give the linear that does the role column, or this one replicated"
        )
    outside = [f"{name} ({plan.roles[name]})" for name in plan.named(*SHARDED_IN_REGIONS) if plan.block(name) is None]
    if axis.sequence_parallel and outside:
        more = " ..." if len(outside) > 4 else ""
        raise ValueError(
            "ds_npu.parallel.sequence_parallel: found true; outside of blocks, where sequences are whole, "
            f"{plan.model} shards {', '.join(outside[:4])}{more}. What to do: false, or give the modules around them "
            "the role block in ds_npu.plan"
        )


def wrap(name: str, what: str, make: Callable[[], object] | None) -> Change:
    """The change that wraps the forward of the module ``name`` at the level of regions."""
    return Change("wraps", name, what, make, Level.REGION)


class Regions:
    """Declares the changes around the parallel layers of one model; ``modules``: all its modules by name."""

    def __init__(
        self, plan: ModelPlan, modules: Mapping[str, nn.Module], axis: TensorAxis, randomness: RegionRandomness
    ) -> None:
        self.plan, self.modules, self.axis, self.randomness = plan, modules, axis, randomness
        self.sequences = SequenceParallel(axis) if axis.sequence_parallel else None

    @property
    def outside(self) -> RandomNumbers:
        """Random numbers for computations of a region's module before the region."""
        return nullcontext if self.axis.sequence_parallel else self.randomness.outside

    def is_partial(self, module: str) -> bool:
        """Whether each rank computes a part of the gradient of the whole weights in ``module``."""
        if any(names.is_inside(module, whole) for whole in self._whole):
            return False
        in_block = self.plan.block(module) is not None or self.plan.of(module) is Role.BLOCK
        if self.axis.sequence_parallel and in_block:
            return True
        at_border = self.plan.roles.get(module) in (Role.LATENT, *ROW_ROLES) or is_at_border(self.plan, module)
        in_region = self.plan.around(module, *REGION_ROLES) is not None or self.plan.of(module) in REGION_ROLES
        return in_region and not at_border

    def changes(self) -> Iterator[Change]:
        """Every change; they are to be made when the parallel layers exist."""
        for name in (each for role in REGION_ROLES for each in self.plan.named(role)):
            yield from self._region(name)
        if self.sequences and self.plan.blocks:
            stages = [each for each in stages_in(self.modules[""]) if each.blocks]
            for index, run in enumerate(self.plan.runs):
                yield from self._shard_run(run, self.sequences, stages[index] if stages else None)
            yield from self._shard_sequences(self.sequences)

    @cached_property
    def _whole(self) -> list[str]:
        """The outermost unsharded modules in blocks that may mix or count tokens: they are given whole sequences.

        They are ``replicated``, or have no weights and so no role.
        """
        if not self.sequences:
            return []
        plan = self.plan
        free = [name for name in self.modules if plan.of(name) is None and plan.sublayer(name) is None]
        found = dict.fromkeys(map(self._outermost_whole, (*plan.named(Role.REPLICATED), *free)))
        return [
            name
            for name in found
            if name is not None
            and not all(
                kinds.works_on_tokens(each) and not kinds.is_sparse(each) for each in self.modules[name].modules()
            )
        ]

    def _outermost_whole(self, name: str) -> str | None:
        """The outermost unsharded module around ``name`` in its block.

        None where there is none, and outside of blocks.
        """
        plan, block = self.plan, self.plan.block(name)
        if block is None:
            return None
        in_block = [each for each in (name, *names.ancestors(name)) if each != block and names.is_inside(each, block)]
        roles = ({plan.of(inner) for inner in (each, *plan.inside(each))} for each in in_block)
        whole = [each for each, found in zip(in_block, roles, strict=True) if found <= {Role.REPLICATED, None}]
        return next((each for each in reversed(whole) if not isinstance(self.modules[each], LISTS)), None)

    def _region(self, name: str) -> Iterator[Change]:
        numbers = {} if self.sequences else self._random_numbers(self.modules[name])
        if numbers:
            # Dropout behind the row linear (GPT-2) must be the same on every rank.
            for row in (with_adapter(each) for each in self.plan.inside(name, *ROW_ROLES)):
                yield Change("hooks", row, "random numbers outside of the region again", partial(self._leave, row))
        yield wrap(name, "region", partial(self._make_region, name, numbers))

    def _leave(self, row: str) -> None:
        self.modules[row].register_forward_hook(lambda *_: self.randomness.leave())

    def _make_region(self, name: str, numbers: dict[str, RandomNumbers]) -> None:
        for roles in JOINT_ROLES:
            mine = [self.modules[each] for each in self.plan.inside(name, *roles) if not names.is_copy(each)]
            layers = [each for each in mine if isinstance(each, ColumnLinear)]
            if layers:
                group_projections(layers)
        make_region(self.modules[name], self.axis, self.sequences, **numbers)

    def _shard_run(self, run: Sequence[str], sequences: SequenceParallel, stage: Stage | None) -> Iterator[Change]:
        """The changes that shard the sequence throughout ``run``, the blocks of one forward (sequence parallelism).

        Hidden states travel between pipeline stages as shards while there are blocks to come.
        """
        blocks = [self.modules[name] for name in run]
        arrive = stage is not None and stage.index > 0
        leave = stage is not None and stage.behind > 0
        shard = partial(run_on_sequence_shards, arrive_sharded=arrive, leave_sharded=leave)
        make = partial(shard, blocks, sequences, **self._random_numbers(*blocks))
        for index, name in enumerate(run):
            yield wrap(name, "sequence shards", None if index else make)
            begins = "is sent shards of the sequence" if arrive else "shards the sequence"
            yield wrap(name, "goes on with its MicroBatch" if index else begins, None)
        if not leave:
            yield wrap(run[-1], "gathers the sequence", None)

    def _shard_sequences(self, sequences: SequenceParallel) -> Iterator[Change]:
        """The changes of sequence parallelism outside of regions."""
        for name in self.plan.blocks:
            recompute = partial(recompute_in_micro_batch, self.modules[name])
            yield Change("wraps", name, "recomputed in its MicroBatch", recompute, Level.RECOMPUTE)
        yield wrap(
            "",
            "hidden_states are gathered",
            partial(join_hidden_states, self.modules[""], len(self.plan.blocks), sequences),
        )
        for name in self._whole:
            inside = self.modules[name].modules()
            numbers = {"random_numbers": self.randomness.outside} if any(map(drops, inside)) else {}
            make = partial(run_on_whole_sequences, self.modules[name], sequences, **numbers)
            yield wrap(name, "whole sequences", make)
        configs = (config_of(module) for module in self.modules.values())
        has_auxiliary_loss = any(has_setting(each, "output_router_logits") for each in configs if each is not None)
        for name in self.plan.named(Role.ROUTER) if has_auxiliary_loss else []:
            router = self.modules[name]
            make = partial(show_all_tokens, router, sequences, logits_index(self.modules[""], router))
            yield wrap(name, "logits of all tokens", make)
        for name in dict.fromkeys(around for block in self.plan.blocks for around in names.ancestors(block)):
            yield wrap(name, "begins a MicroBatch", partial(begin_micro_batches, self.modules[name]))

    def _random_numbers(self, *modules: nn.Module) -> dict[str, RandomNumbers]:
        """Arguments for random numbers of this rank's own; none where ``modules`` drop nothing."""
        is_random = any(drops(each) for module in modules for each in module.modules())
        return {"random_numbers": self.randomness.region} if is_random else {}
