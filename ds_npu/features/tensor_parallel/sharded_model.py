"""Shards the weights of a user's model over the tensor ranks, in place, by the roles of its ModelPlan.

Modules keep their names, and parameters stay the same objects, so that an optimizer made before still holds them. No
class is changed: projections are replaced by parallel ones, and the forwards of some modules of this one model are
wrapped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.tensor_parallel.adapters import (
    adapted_layers,
    check_adapters,
    enter_by_factors,
    factor_shards_of,
    is_at_border,
    keep_padding,
    second_factors,
    with_adapter,
)
from ds_npu.features.tensor_parallel.experts import shard_experts, show_all_tokens
from ds_npu.features.tensor_parallel.latent import make_latent
from ds_npu.features.tensor_parallel.recomputation import recompute_in_micro_batch
from ds_npu.features.tensor_parallel.refusal import check_shardable, refuse_saving_shards
from ds_npu.features.tensor_parallel.role_shards import (
    ROW_ROLES,
    RoleShards,
    even_shards,
    paired_shards,
    role_shards_of,
)
from ds_npu.features.tensor_parallel.vocabulary import local_axis, shard_logits
from ds_npu.features.tensor_parallel.whole_sequences import need_whole_sequences
from ds_npu.models import kinds, names
from ds_npu.models.attributes import attribute, has_attribute, set_attribute
from ds_npu.models.compiled import check_not_compiled, refuse_compiling
from ds_npu.models.hugging_face_model import config_of, has_setting
from ds_npu.models.local_heads import local_heads
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.forward_wraps import Level, wrap_forward
from ds_npu.parallel.placement import keep_shard, sharding_of
from ds_npu.parallel.tensor.axis import MatmulCollectives, TensorAxis, tensor_axis
from ds_npu.parallel.tensor.embedding import VocabParallelEmbedding
from ds_npu.parallel.tensor.gradient import sum_gradient
from ds_npu.parallel.tensor.linear import ColumnLinear, RowLinear, project_together
from ds_npu.parallel.tensor.randomness import RegionRandomness, drops
from ds_npu.parallel.tensor.region import (
    RandomNumbers,
    SequenceParallel,
    begin_micro_batches,
    check_sequences,
    join_hidden_states,
    make_region,
    run_on_sequence_shards,
    run_on_whole_sequences,
)
from ds_npu.parallel.tensor.weight_layout import WeightLayout
from ds_npu.topology.topology import Topology

REGION_ROLES = (Role.ATTENTION, Role.MLP)
"""Sublayers that are tensor-parallel regions; of an MoE layer, the experts and shared MLPs are."""
COLUMN_ROLES = (
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
SHARDED_ATTRIBUTE = "ds_npu_sharded_model"
"""The attribute of a sharded model that is its ShardedModel."""
TOGETHER = ((Role.QUERY, Role.KEY, Role.VALUE), (Role.GATE, Role.UP))
"""Roles of linears that a module calls with the same hidden states."""


@dataclass(frozen=True)
class ShardedModel:
    """What ``shard_model`` did to a model."""

    fetched_together: list[nn.Module]
    """Modules that use each other's weights in their forwards, which ZeRO-3 must therefore gather together."""


def shard_model(
    model: nn.Module,
    plan: ModelPlan,
    topology: Topology,
    sequence_parallel: bool = False,
    collectives: MatmulCollectives | None = None,
    device_type: str = "cpu",
) -> ShardedModel:
    """Shard ``model`` over the tensor ranks of ``topology``; it will draw random numbers on ``device_type``.

    ``collectives``: the products that overlap with sequence parallelism's collectives; None: one after the other.
    Raises ValueError, before anything is changed, that names every module that cannot be sharded over so many ranks.
    Source: Megatron-LM, arXiv 1909.08053 and (sequence parallelism) 2205.05198.
    """
    check_not_compiled(model, "tensor")
    axis = tensor_axis(topology, sequence_parallel, collectives)
    sharded = _ModelSharder(model, plan, axis, topology, RegionRandomness(topology, device_type)).run()
    set_attribute(model, SHARDED_ATTRIBUTE, sharded)
    refuse_saving_shards(model)
    refuse_compiling(model, "tensor")
    return sharded


def sharded_model_of(model: nn.Module) -> ShardedModel | None:
    """What ``shard_model`` did to ``model``; None where it must still be sharded, which parallel layers need not be."""
    done = attribute(model, SHARDED_ATTRIBUTE, ShardedModel)
    own = done is None and any(sharding_of(parameter) is not None for parameter in model.parameters())
    return ShardedModel([]) if own else done


class _ModelSharder:
    """Shards one model."""

    def __init__(
        self, model: nn.Module, plan: ModelPlan, axis: TensorAxis, topology: Topology, randomness: RegionRandomness
    ) -> None:
        self.model, self.plan, self.axis, self.topology, self.randomness = model, plan, axis, topology, randomness
        self.sequences = SequenceParallel(axis) if axis.sequence_parallel else None
        self.modules = dict(model.named_modules())

    def run(self) -> ShardedModel:
        check_shardable(self.model, self.plan, self.axis)
        shards = role_shards_of(self.plan, self._widths(), self.axis.size)
        check_adapters(self.plan, self.modules)
        experts = self._experts()
        self._prepare_adapters()
        for name, each in {**factor_shards_of(self.plan, shards), **shards}.items():
            self._shard(name, each)
        for name, (gate_up, down) in experts.items():
            shard_experts(self.modules[name], gate_up.sharding(1), down.sharding(2), self.axis)
        for name in self.plan.named(Role.LATENT):
            make_latent(self.modules[name])
        for name in self.plan.attentions:
            self._localise(name)
        self._sum_partial_gradients()
        return ShardedModel(self._regions())

    def _of(self, *roles: Role) -> Iterator[tuple[str, nn.Module]]:
        return ((name, self.modules[name]) for role in roles for name in self.plan.named(role))

    def _widths(self) -> dict[str, int]:
        """By name, the outputs of column linears, the inputs of row linears, the words of embeddings and heads."""
        widths = {}
        for name, module in self._of(*COLUMN_ROLES, *ROW_ROLES, Role.EMBEDDING, Role.HEAD):
            weight = module.get_parameter("weight")
            widths[name] = weight.shape[_dim(module, self.plan.roles[name] not in ROW_ROLES)]
        return widths

    def _experts(self) -> dict[str, tuple[RoleShards, RoleShards]]:
        """The shards of experts: (gate and up, down)."""
        found = {}
        for name, module in self._of(Role.EXPERTS):
            width = module.get_parameter("down_proj").shape[2]
            found[name] = paired_shards(2 * width, self.axis.size), even_shards(width, self.axis.size)
        return found

    def _shard(self, name: str, shards: RoleShards) -> None:
        layer, module = self.plan.adapted(name) or name, self.modules[name]
        role = self.plan.roles[layer]
        if role is Role.EMBEDDING:
            VocabParallelEmbedding.adopt(module, self.topology)
            return
        is_row = role in ROW_ROLES
        weight, bias = module.get_parameter("weight"), _bias(module)
        form = WeightLayout(kinds.output_dim(module) == 1, shards.outputs(self.axis.rank))
        if not shards.whole:
            keep_shard(weight, shards.sharding(_dim(module, not is_row)), self.axis.rank)
            if bias is not None and not is_row:
                keep_shard(bias, shards.sharding(0), self.axis.rank)
        if is_row:
            self._put(name, RowLinear(weight, bias, self.axis, form))
            self._expect_sequences(name)
        elif role is Role.HEAD:
            self._put(name, ColumnLinear(weight, bias, local_axis(self.axis), form, inside=False))
            if name == layer:
                heads = [self.modules[each] for each in (name, *second_factors(self.plan, name))]
                shard_logits(self.modules[names.owner(name)], heads, shards.sharding(0), self.topology)
        else:
            inside = self.plan.around(name, *REGION_ROLES) is not None
            self._put(name, ColumnLinear(weight, bias, self.axis, form, inside))
            if not inside:
                self._expect_sequences(name)

    def _expect_sequences(self, name: str) -> None:
        """Make a linear at a region's border raise ValueError for flattened hidden states, which have no shards."""

        def checked(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            check_sequences(x, name)
            return forward(x)

        if self.axis.sequence_parallel:
            wrap_forward(self.modules[name], checked, Level.REGION)

    def _prepare_adapters(self) -> None:
        for name in adapted_layers(self.plan):
            adapter, base, role = self.modules[with_adapter(name)], self.modules[name], self.plan.roles[name]
            if role is Role.EMBEDDING:
                keep_padding(adapter, base)
            elif role in (Role.LATENT, *COLUMN_ROLES) and self.plan.around(name, *REGION_ROLES) is not None:
                enter_by_factors(adapter, self.axis, self._outside)

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        module.train(self.modules[name].training)
        self.modules[name] = module
        setattr(self.modules[parent], leaf, module)

    def _localise(self, name: str) -> None:
        """Set the numbers of heads that an attention module stores to those of this rank."""
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
        for key, count in counts.items():
            if has_attribute(module, key):
                set_attribute(module, key, count)
        config = config_of(module)
        if config is not None and self.plan.inside(name, Role.QUERY_KEY_VALUE):
            # Phi-3 reads from its config, which the whole model shares, where the parts of the fused projection end.
            local_config = copy.copy(config)
            local_config.num_attention_heads, local_config.num_key_value_heads = heads, kv_heads
            set_attribute(module, "config", local_config)

    def _sum_partial_gradients(self) -> None:
        """Sum over the ranks the gradients of whole weights that each rank uses for its heads or sequence shard."""
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
        at_border = self.plan.roles.get(module) in (Role.LATENT, *ROW_ROLES) or is_at_border(self.plan, module)
        return self.plan.around(module, *REGION_ROLES) is not None and not at_border

    def _regions(self) -> list[nn.Module]:
        regions = list(self._of(*REGION_ROLES))
        for name, module in regions:
            for roles in TOGETHER:
                found = self.plan.inside(name, *roles)
                mine = [self.modules[each] for each in found if not names.is_copy(each)]
                layers = [each for each in mine if isinstance(each, ColumnLinear)]
                if layers:
                    project_together(layers)
            numbers = {} if self.sequences else self._random_numbers(module)
            if numbers:
                # Dropout behind the row linear (GPT-2) must be the same on every rank.
                for row in self._rows(name):
                    row.register_forward_hook(lambda *_: self.randomness.leave())
            make_region(module, self.axis, self.sequences, **numbers)
        if self.sequences and self.plan.blocks:
            self._shard_sequences(self.sequences)
        return [module for _, module in regions]

    def _shard_sequences(self, sequences: SequenceParallel) -> None:
        """With sequence parallelism ranks hold different tokens in all of a block."""
        blocks = [self.modules[name] for name in self.plan.blocks]
        run_on_sequence_shards(blocks, sequences, **self._random_numbers(*blocks))
        for block in blocks:
            recompute_in_micro_batch(block)
        join_hidden_states(self.model, len(blocks), sequences)
        for each in map(self.modules.__getitem__, self._whole):
            numbers = {"random_numbers": self.randomness.outside} if any(map(drops, each.modules())) else {}
            run_on_whole_sequences(each, sequences, **numbers)
        for _, router in self._of(Role.ROUTER):
            if self._counts_tokens:
                show_all_tokens(router, sequences)
        for name in dict.fromkeys(around for block in self.plan.blocks for around in names.ancestors(block)):
            begin_micro_batches(self.modules[name])

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

    def _rows(self, name: str) -> list[nn.Module]:
        return [self.modules[with_adapter(each)] for each in self.plan.inside(name, *ROW_ROLES)]

    @property
    def _outside(self) -> RandomNumbers:
        """Random numbers of what a module in a region computes before the region."""
        return nullcontext if self.axis.sequence_parallel else self.randomness.outside


def _dim(module: nn.Module, outputs: bool) -> int:
    """The dim of ``module``'s weight that its outputs, or else its inputs, run along."""
    return kinds.output_dim(module) if outputs else 1 - kinds.output_dim(module)


def _bias(module: nn.Module) -> nn.Parameter | None:
    return dict(module.named_parameters(recurse=False)).get("bias")
