"""The tensor-parallel regions of a model, and what sequence parallelism does to the modules around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial

from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.declaration import Change
from ds_npu.features.modules.closing_checkpoint import recompute_in_micro_batch
from ds_npu.features.tensor_parallel.adapters import is_at_border, with_adapter
from ds_npu.features.tensor_parallel.experts import show_all_tokens
from ds_npu.features.tensor_parallel.role_shards import ROW_ROLES
from ds_npu.features.tensor_parallel.whole_sequences import need_whole_sequences
from ds_npu.models import names
from ds_npu.models.hugging_face_model import config_of, has_setting, logits_index
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.runtime.forward_wraps import Level
from ds_npu.parallel.tensor.axis import TensorAxis
from ds_npu.parallel.tensor.linear import ColumnLinear, group_projections
from ds_npu.parallel.tensor.randomness import RegionRandomness, drops
from ds_npu.parallel.tensor.region import (
    RandomNumbers,
    SequenceParallel,
    begin_micro_batches,
    join_hidden_states,
    make_region,
    run_on_sequence_shards,
    run_on_whole_sequences,
)

REGION_ROLES = (Role.ATTENTION, Role.MLP)
"""Sublayers that are tensor-parallel regions; in an MoE layer, the experts and shared MLPs are regions."""
JOINT_ROLES = ((Role.QUERY, Role.KEY, Role.VALUE), (Role.GATE, Role.UP))
"""Roles of linears that a module calls with the same hidden states."""


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
        if self.axis.sequence_parallel and self.plan.block(module) is not None:
            return True
        at_border = self.plan.roles.get(module) in (Role.LATENT, *ROW_ROLES) or is_at_border(self.plan, module)
        return self.plan.around(module, *REGION_ROLES) is not None and not at_border

    def changes(self) -> Iterator[Change]:
        """Every change; the parallel layers exist when they are made."""
        for name in (each for role in REGION_ROLES for each in self.plan.named(role)):
            yield from self._region(name)
        if self.sequences and self.plan.blocks:
            for run in self.plan.runs:
                yield from self._shard_run(run, self.sequences)
            yield from self._shard_sequences(self.sequences)

    @cached_property
    def _whole(self) -> list[str]:
        return need_whole_sequences(self.plan, self.modules) if self.axis.sequence_parallel else []

    def _region(self, name: str) -> Iterator[Change]:
        module = self.modules[name]
        numbers = {} if self.sequences else self._random_numbers(module)
        if numbers:
            # Dropout behind the row linear (GPT-2) must be the same on every rank.
            for row in (with_adapter(each) for each in self.plan.inside(name, *ROW_ROLES)):
                yield Change("hooks", row, "random numbers outside of the region again", partial(self._leave, row))
        yield wrap(name, "region", partial(self._make_region, name, numbers))

    def _leave(self, row: str) -> None:
        self.modules[row].register_forward_hook(lambda *_: self.randomness.leave())

    def _make_region(self, name: str, numbers: dict[str, RandomNumbers]) -> None:
        for roles in JOINT_ROLES:
            found = self.plan.inside(name, *roles)
            mine = [self.modules[each] for each in found if not names.is_copy(each)]
            layers = [each for each in mine if isinstance(each, ColumnLinear)]
            if layers:
                group_projections(layers)
        make_region(self.modules[name], self.axis, self.sequences, **numbers)

    def _shard_run(self, run: Sequence[str], sequences: SequenceParallel) -> Iterator[Change]:
        """Shard the sequence in all of a block, for sequence parallelism; ``run``: the blocks of one forward."""
        blocks = [self.modules[name] for name in run]
        make: Callable[[], object] | None = partial(
            run_on_sequence_shards, blocks, sequences, **self._random_numbers(*blocks)
        )
        for name in run:
            yield wrap(name, "sequence shards", make)
            yield wrap(name, "shards the sequence" if name == run[0] else "goes on with its MicroBatch", None)
            make = None
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
        for name in self.plan.named(Role.ROUTER) if self._counts_tokens else []:
            router = self.modules[name]
            make = partial(show_all_tokens, router, sequences, logits_index(self.modules[""], router))
            yield wrap(name, "logits of all tokens", make)
        for name in dict.fromkeys(around for block in self.plan.blocks for around in names.ancestors(block)):
            yield wrap(name, "begins a MicroBatch", partial(begin_micro_batches, self.modules[name]))

    @cached_property
    def _counts_tokens(self) -> bool:
        """Whether the model has an auxiliary loss of the router logits."""
        configs = (config_of(module) for module in self.modules.values())
        return any(has_setting(config, "output_router_logits") for config in configs if config is not None)

    def _random_numbers(self, *modules: nn.Module) -> dict[str, RandomNumbers]:
        """Arguments for random numbers of this rank's own; none where ``modules`` drop nothing."""
        if not any(drops(each) for module in modules for each in module.modules()):
            return {}
        return {"random_numbers": self.randomness.region}
