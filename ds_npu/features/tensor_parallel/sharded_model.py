"""Splits a user's model over the tensor ranks, in place, as its ModelPlan says which module is what.

Modules keep their names and parameters stay the objects they were, so an optimizer that holds them already goes on
holding them. No class is changed: projections are replaced by parallel ones, and some modules of this one model get a
forward of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.tensor_parallel.adapters import (
    adapted_layers,
    check_adapters,
    cuts_of_factors,
    enter_by_factors,
    is_at_border,
    keep_padding,
    second_factors,
    with_adapter,
)
from ds_npu.features.tensor_parallel.experts import show_all_tokens, split_experts
from ds_npu.features.tensor_parallel.latent import make_latent
from ds_npu.features.tensor_parallel.refusal import check_splittable, refuse_parts
from ds_npu.features.tensor_parallel.role_shards import ROWS, Cut, cuts_of, even, halves, local_heads
from ds_npu.features.tensor_parallel.vocabulary import local_axis, split_loss
from ds_npu.features.tensor_parallel.whole_sequences import need_whole_sequences
from ds_npu.models import kinds, names
from ds_npu.models.compiled import check_not_compiled, refuse_compiling
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.forward_wraps import wrap_forward
from ds_npu.parallel.tensor.axis import MatmulCollectives, TensorAxis, tensor_axis
from ds_npu.parallel.tensor.embedding import VocabParallelEmbedding
from ds_npu.parallel.tensor.gradient import sum_gradient
from ds_npu.parallel.tensor.linear import ColumnLinear, RowLinear, project_together
from ds_npu.parallel.tensor.randomness import RegionRandomness, drops
from ds_npu.parallel.tensor.region import (
    RandomNumbers,
    SequenceShards,
    check_sequences,
    join_hidden_states,
    make_region,
    run_on_whole_sequences,
    shard_sequences,
)
from ds_npu.parallel.tensor.sharding import keep_shard, sharding_of
from ds_npu.parallel.tensor.weight_layout import WeightLayout
from ds_npu.topology.topology import Topology

REGIONS = (Role.ATTENTION, Role.MLP)
COLUMNS = (
    Role.QUERY,
    Role.KEY,
    Role.VALUE,
    Role.QUERY_KEY_VALUE,
    Role.LATENT_QUERY,
    Role.LATENT_KEY_VALUE,
    Role.GATE,
    Role.UP,
    Role.GATE_UP,
    Role.COLUMN,
)
SPLIT = "ds_npu_split"
TOGETHER = ((Role.QUERY, Role.KEY, Role.VALUE), (Role.GATE, Role.UP))
"""Roles whose linears a module calls with the same hidden states."""


@dataclass(frozen=True)
class SplitModel:
    """What was done to a model."""

    fetched_together: list[nn.Module]
    """Modules whose weights are used by one another's forward, so that ZeRO-3 has to gather them at once."""


def split_model(
    model: nn.Module,
    plan: ModelPlan,
    topology: Topology,
    sequence_parallel: bool = False,
    collectives: MatmulCollectives | None = None,
    device_type: str = "cpu",
) -> SplitModel:
    """Split ``model`` over the tensor ranks of ``topology``; on ``device_type`` it will draw its random numbers.

    Raises ValueError, before anything is changed, naming every module that cannot be split over so many ranks.
    """
    check_not_compiled(model, "tensor")
    axis = tensor_axis(topology, sequence_parallel, collectives)
    split = _Splitting(model, plan, axis, topology, RegionRandomness(topology, device_type)).run()
    model.__dict__[SPLIT] = split
    refuse_parts(model)
    refuse_compiling(model, "tensor")
    return split


def split_of(model: nn.Module) -> SplitModel | None:
    """What was done to ``model``; None where nothing was. Of a model made of parallel layers nothing needs to be."""
    done: SplitModel | None = vars(model).get(SPLIT)
    own = done is None and any(sharding_of(parameter) is not None for parameter in model.parameters())
    return SplitModel([]) if own else done


class _Splitting:
    """One model being split."""

    def __init__(
        self, model: nn.Module, plan: ModelPlan, axis: TensorAxis, topology: Topology, randomness: RegionRandomness
    ) -> None:
        self.model, self.plan, self.axis, self.topology, self.randomness = model, plan, axis, topology, randomness
        self.shards = SequenceShards(axis)
        self.modules = dict(model.named_modules())

    def run(self) -> SplitModel:
        check_splittable(self.model, self.plan, self.axis)
        cuts = cuts_of(self.plan, self._widths(), self.axis.size)
        check_adapters(self.plan, self.modules)
        experts = self._experts()
        self._let_adapters_know()
        for name, cut in {**cuts_of_factors(self.plan, cuts), **cuts}.items():
            self._split(name, cut)
        for name, (gate_up, down) in experts.items():
            split_experts(self.modules[name], gate_up.sharding(1), down.sharding(2), self.axis)  # type: ignore[arg-type]
        for name in self.plan.named(Role.LATENT):
            make_latent(self.modules[name])
        for name in self.plan.attentions:
            self._localise(name)
        self._sum_partial_gradients()
        return SplitModel(self._regions())

    def _of(self, *roles: Role) -> Iterator[tuple[str, nn.Module]]:
        return ((name, self.modules[name]) for role in roles for name in self.plan.named(role))

    def _widths(self) -> dict[str, int]:
        """The outputs of each column linear, the inputs of each row linear, the words of embeddings and heads."""
        widths = {}
        for name, module in self._of(*COLUMNS, *ROWS, Role.EMBEDDING, Role.HEAD):
            weight = module.get_parameter("weight")
            widths[name] = weight.shape[_dim(module, self.plan.roles[name] not in ROWS)]
        return widths

    def _experts(self) -> dict[str, tuple[Cut, Cut]]:
        """Where experts are cut: (gate and up, down)."""
        found = {}
        for name, module in self._of(Role.EXPERTS):
            width = module.get_parameter("down_proj").shape[2]
            found[name] = halves(2 * width, self.axis.size), even(width, self.axis.size)
        return found

    def _split(self, name: str, cut: Cut) -> None:
        layer, module = self.plan.adapted(name) or name, self.modules[name]
        role = self.plan.roles[layer]
        if role is Role.EMBEDDING:
            VocabParallelEmbedding.adopt(module, self.topology)
            return
        is_row = role in ROWS
        weight, bias = module.get_parameter("weight"), _bias(module)
        form = WeightLayout(kinds.output_dim(module) == 1, cut.outputs(self.axis.rank))
        if not cut.whole:
            keep_shard(weight, cut.sharding(_dim(module, not is_row)), self.axis.rank)  # type: ignore[arg-type]
            if bias is not None and not is_row:
                keep_shard(bias, cut.sharding(0), self.axis.rank)  # type: ignore[arg-type]
        if is_row:
            self._put(name, RowLinear(weight, bias, self.axis, form))
            self._expect_sequences(name)
        elif role is Role.HEAD:
            self._put(name, ColumnLinear(weight, bias, local_axis(self.axis), form, inside=False))
            if name == layer:
                heads = [self.modules[each] for each in (name, *second_factors(self.plan, name))]
                split_loss(self.modules[names.owner(name)], heads, cut.sharding(0), self.topology)  # type: ignore[arg-type]
        else:
            inside = self.plan.around(name, *REGIONS) is not None
            self._put(name, ColumnLinear(weight, bias, self.axis, form, inside))
            if not inside:
                self._expect_sequences(name)

    def _expect_sequences(self, name: str) -> None:
        """Let a linear at the border of a region raise ValueError for flattened hidden states, which have no shards."""

        def checked(forward: Any, x: Any) -> Any:
            check_sequences(x, name)
            return forward(x)

        if self.axis.sequence_parallel:
            wrap_forward(self.modules[name], checked)

    def _let_adapters_know(self) -> None:
        for name in adapted_layers(self.plan):
            around, base, role = self.modules[with_adapter(name)], self.modules[name], self.plan.roles[name]
            if role is Role.EMBEDDING:
                keep_padding(around, base)
            elif role in (Role.LATENT, *COLUMNS) and self.plan.around(name, *REGIONS) is not None:
                enter_by_factors(around, self.axis, self._outside)

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        module.train(self.modules[name].training)
        self.modules[name] = module
        setattr(self.modules[parent], leaf, module)

    def _localise(self, name: str) -> None:
        """Tell an attention module how many heads this rank has, where it keeps count."""
        shape, module = self.plan.attentions[name], self.modules[name]
        local = local_heads(shape, self.axis.size)[self.axis.rank]
        heads, kv_heads = len(local.queries), len(local.key_values)
        counts = {
            "num_heads": heads,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "num_key_value_groups": heads // kv_heads,
            "split_size": heads * shape.head_dim,
        }
        kept: dict[str, Any] = module.__dict__
        kept.update({key: count for key, count in counts.items() if key in kept})
        if "config" in kept and self.plan.inside(name, Role.QUERY_KEY_VALUE):
            # Phi-3 asks its config where the fused projection ends; the config is the whole model's.
            kept["config"] = copy.copy(kept["config"])
            kept["config"].num_attention_heads, kept["config"].num_key_value_heads = heads, kv_heads

    def _sum_partial_gradients(self) -> None:
        """Sum the gradients of whole weights that each rank uses for its heads, or for its shard of the sequence."""
        for name, parameter in self.model.named_parameters():
            module = name.rpartition(".")[0]
            if sharding_of(parameter) is None and self._is_partial(module):
                sum_gradient(parameter, self.axis.group)

    @cached_property
    def _whole(self) -> list[str]:
        return need_whole_sequences(self.plan, self.modules) if self.axis.sequence_parallel else []

    def _is_partial(self, module: str) -> bool:
        if any(names.is_inside(module, whole) for whole in self._whole):
            return False
        if self.axis.sequence_parallel and self.plan.block(module) is not None:
            return True
        at_border = self.plan.roles.get(module) in (Role.LATENT, *ROWS) or is_at_border(self.plan, module)
        return self.plan.around(module, *REGIONS) is not None and not at_border

    def _regions(self) -> list[nn.Module]:
        regions = list(self._of(*REGIONS))
        blocks = [self.modules[name] for name in self.plan.blocks]
        sequence = self.axis.sequence_parallel
        for name, module in regions:
            for roles in TOGETHER:
                found = self.plan.inside(name, *roles)
                mine = [self.modules[each] for each in found if not names.is_copy(each)]
                layers = [each for each in mine if isinstance(each, ColumnLinear)]
                if layers:
                    project_together(layers)
            numbers = {} if sequence else self._random_numbers(module)
            if numbers:
                # What a module drops behind its row linear (GPT-2) is the same on every rank.
                for row in self._rows(name):
                    row.register_forward_hook(lambda *_: self.randomness.leave())
            make_region(module, self.axis, self.shards if sequence else None, **numbers)
        if sequence and blocks:
            # With sequence parallelism nothing in a block is the same on two ranks.
            shard_sequences(blocks, self.shards, **self._random_numbers(*blocks))
            join_hidden_states(self.model, len(blocks), self.shards)
            for each in map(self.modules.__getitem__, self._whole):
                numbers = {"random_numbers": self.randomness.outside} if any(map(drops, each.modules())) else {}
                run_on_whole_sequences(each, self.shards, **numbers)
            for _, router in self._of(Role.ROUTER):
                if self._counts_tokens:
                    show_all_tokens(router, self.shards)
        return [module for _, module in regions]

    @cached_property
    def _counts_tokens(self) -> bool:
        """Whether the model has an auxiliary loss over the router's logits."""
        configs = (vars(module).get("config") for module in self.modules.values())
        return any("output_router_logits" in vars(config) for config in configs if config is not None)

    def _random_numbers(self, *modules: nn.Module) -> dict[str, RandomNumbers]:
        """Random numbers of this rank's own, where ``modules`` drop anything."""
        if not any(drops(each) for module in modules for each in module.modules()):
            return {}
        return {"random_numbers": self.randomness.region}

    def _rows(self, name: str) -> list[nn.Module]:
        return [self.modules[with_adapter(each)] for each in self.plan.inside(name, *ROWS)]

    @property
    def _outside(self) -> RandomNumbers:
        """Numbers for what is computed outside of regions, where a module in a region does it."""
        return nullcontext if self.axis.sequence_parallel else self.randomness.outside


def _dim(module: nn.Module, outputs: bool) -> int:
    """The dim of ``module``'s weight along which its outputs, or its inputs, stand."""
    return kinds.output_dim(module) if outputs else 1 - kinds.output_dim(module)


def _bias(module: nn.Module) -> nn.Parameter | None:
    return dict(module.named_parameters(recurse=False)).get("bias")
