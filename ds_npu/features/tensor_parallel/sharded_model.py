"""Shards the weights of a user's model over the tensor ranks, in place, by the roles of its ModelPlan.

Modules keep their names, and parameters remain the same objects, so that an optimizer made before still holds them. No
class is changed: projections are replaced by parallel ones, and the forwards of some modules of this one model are
wrapped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.declaration import Change, making
from ds_npu.features.loss.model_loss import LossLevel, has_causal_lm_loss
from ds_npu.features.modules.expert_layout import expert_layouts
from ds_npu.features.tensor_parallel.adapters import (
    adapted_layers,
    check_adapters,
    enter_by_factors,
    enter_by_output,
    entered_factors,
    factor_shards_of,
    keep_padding,
    with_adapter,
)
from ds_npu.features.tensor_parallel.biases import take_own_biases, takes_biases, use_own_numbers
from ds_npu.features.tensor_parallel.experts import DOWN_BIAS, enter_experts, layouts_to_shard
from ds_npu.features.tensor_parallel.linear_attention_shards import by_heads, linear_attention_shards, own_shards
from ds_npu.features.tensor_parallel.norms import norm_over_ranks
from ds_npu.features.tensor_parallel.regions import REGION_ROLES, Regions, check_shardable, wrap
from ds_npu.features.tensor_parallel.role_shards import (
    ROW_ROLES,
    RoleShards,
    even_shards,
    role_shards_of,
)
from ds_npu.features.tensor_parallel.vocabulary import shard_logits
from ds_npu.models import kinds, names
from ds_npu.models.attention_modules import HEADS, KEY_VALUE_HEADS, local_heads
from ds_npu.models.attributes import attribute, set_attribute
from ds_npu.models.guards import check_not_compiled, refuse_compiling, refuse_saving_shards
from ds_npu.models.hugging_face_model import config_of
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.runtime.forward_wraps import Level, wrap_forward
from ds_npu.parallel.runtime.marks import Mark
from ds_npu.parallel.runtime.placement import keep_shard, sharding_of
from ds_npu.parallel.tensor.axis import ChoosesCollectives, TensorAxis, tensor_axis
from ds_npu.parallel.tensor.embedding import VocabParallelEmbedding, check_adoptable
from ds_npu.parallel.tensor.linear import ColumnLinear, RowLinear
from ds_npu.parallel.tensor.product import WeightLayout
from ds_npu.parallel.tensor.randomness import RegionRandomness
from ds_npu.parallel.tensor.region import check_sequences
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.parallel.tensor.weight_gradient import sum_gradient
from ds_npu.topology.topology import Topology

COLUMN_ROLES = (
    Role.QUERY,
    Role.KEY,
    Role.VALUE,
    Role.QUERY_KEY_VALUE,
    Role.QUERY_KEY_VALUE_BY_GROUP,
    Role.ATTENTION_GATE,
    Role.LATENT_QUERY,
    Role.LATENT_KEY_VALUE,
    Role.GATE,
    Role.UP,
    Role.GATE_UP,
    Role.COLUMN,
)
OF_ALL_HEADS = ("split_size", "embed_dim", "d_model_size", "all_head_size")
"""Attributes in which attentions keep the width of all their heads."""
SHARDED_MODEL: Mark[ShardedModel] = Mark("sharded model")
"""The sharding of a model."""


@dataclass(frozen=True)
class ShardedModel:
    """The result of ``shard_model`` on a model."""

    jointly_gathered: list[nn.Module]
    """Modules that use each other's weights in their forwards, which ZeRO-3 must therefore gather jointly."""


def declare_shards(
    model: nn.Module,
    plan: ModelPlan,
    topology: Topology,
    sequence_parallel: bool = False,
    collectives: ChoosesCollectives | None = None,
    device_type: str = "cpu",
) -> list[Change]:
    """The changes, in order, that shard ``model`` over the tensor ranks of ``topology``.

    Its regions will draw random numbers on ``device_type``. ``collectives`` chooses how products overlap with
    sequence parallelism's collectives; None: no overlap. Raises ValueError that names every module that cannot be
    sharded over so many ranks. Source: Megatron-LM, arXiv 1909.08053 and (sequence parallelism) 2205.05198.
    """
    check_not_compiled(model, "tensor")
    axis = tensor_axis(topology, sequence_parallel, collectives)
    sharder = _ModelSharder(model, plan, axis, topology, RegionRandomness(topology, device_type))
    return list(sharder.changes())


shard_model = making(declare_shards)


def sharded_model_of(model: nn.Module) -> ShardedModel | None:
    """The result of ``shard_model`` on ``model``, or on a model that it has wrapped since (PEFT).

    None where it must still be sharded. A model with parallel layers of the user's own need not be: an empty result.
    """
    done = next(filter(None, map(SHARDED_MODEL.get, model.modules())), None)
    own = done is None and any(sharding_of(parameter) is not None for parameter in model.parameters())
    return ShardedModel([]) if own else done


class _ModelSharder:
    """Declares the changes of one model, and makes them when they are applied."""

    def __init__(
        self, model: nn.Module, plan: ModelPlan, axis: TensorAxis, topology: Topology, randomness: RegionRandomness
    ) -> None:
        self.model, self.plan, self.axis, self.topology = model, plan, axis, topology
        self.modules = dict(model.named_modules())
        self.regions = Regions(plan, self.modules, axis, randomness)
        self.sharded: set[str] = set()
        self.linked: set[str] = set()
        """Models whose loss is declared to be linked: PEFT keeps both a head and the copy of it that it trains."""

    def changes(self) -> Iterator[Change]:
        """Every change, in order; raises ValueError first where the model cannot be sharded."""
        check_shardable(self.model, self.plan, self.axis)
        shards = {
            **role_shards_of(self.plan, self._widths(), self.axis.size),
            **linear_attention_shards(self.plan, self.modules, self.axis.size),
        }
        check_adapters(self.plan, self.modules)
        # Experts with an axis of their own are the matter of ds_npu.moe.
        own = dict(self._of(Role.EXPERTS)) if self.topology.size("ep", "etp") == 1 else {}
        experts = layouts_to_shard(expert_layouts(self.model, self.plan) if own else {}, own, self.axis.size)
        yield from self._adapters()
        for name, each in {**factor_shards_of(self.plan, shards), **shards}.items():
            yield from self._shard(name, each)
        for name, layout in experts.items():
            for parameter in layout.names:
                yield self._keep(name, parameter, layout.column_sharding(parameter, self.axis.size))
            bias = layout.column_sharding(DOWN_BIAS, self.axis.size) if layout.has_bias else None
            yield wrap(name, "tokens enter the region", partial(enter_experts, self.modules[name], self.axis, bias))
        for name in self.plan.named(Role.LATENT):
            make = partial(wrap_forward, self.modules[name], enter_by_output, Level.REGION)
            yield wrap(name, "computed before the region", make)
        for name in self.plan.attentions:
            yield from self._localise(name)
        for name, layer in self._of(Role.LINEAR_ATTENTION):
            for holder, leaf, sharding in own_shards(name, layer, self.axis.size):
                yield self._keep(holder, leaf, sharding)
            yield from by_heads(name, layer, self.axis)
        yield from self._sum_partial_gradients()
        yield from self.regions.changes()
        fetched = [self.modules[name] for name in self.plan.named(*REGION_ROLES)]
        attributes = f"{SHARDED_MODEL.name}, save_pretrained, __deepcopy__, compile"
        yield Change("sets", "", attributes, partial(self._finish, ShardedModel(fetched)))

    def _finish(self, sharded: ShardedModel) -> None:
        SHARDED_MODEL.set(self.model, sharded)
        refuse_saving_shards(self.model)
        refuse_compiling(self.model, "tensor")

    def _of(self, *roles: Role) -> Iterator[tuple[str, nn.Module]]:
        return ((name, self.modules[name]) for role in roles for name in self.plan.named(role))

    def _widths(self) -> dict[str, int]:
        """Outputs of column linears, inputs of row linears, words of embeddings and heads, by module name."""
        return {
            name: module.get_parameter("weight").shape[_dim(module, self.plan.roles[name] not in ROW_ROLES)]
            for name, module in self._of(*COLUMN_ROLES, *ROW_ROLES, Role.EMBEDDING, Role.HEAD, Role.SHARDED_NORM)
            if self.plan.roles[name] is not Role.LINEAR_ATTENTION_OUTPUT
        }

    def _keep(self, module: str, parameter: str, sharding: Sharding) -> Change:
        """Reduce a parameter of ``module`` to this rank's shard."""
        name = f"{module}.{parameter}".lstrip(".")
        self.sharded.add(name)
        held = f"dim {sharding.dim} over tp: {sharding.length(self.axis.rank):,} of {sharding.size:,}"
        weight = self.modules[module].get_parameter(parameter)
        return Change("shards", name, held, partial(keep_shard, weight, sharding, self.axis.rank))

    def _shard(self, name: str, shards: RoleShards) -> Iterator[Change]:
        layer = self.plan.adapted(name) or name
        module = self.modules[name]
        role = self.plan.roles[layer]
        if role is Role.SHARDED_NORM:
            make = norm_over_ranks(module, name, shards.size, self.axis)
            yield self._keep(name, "weight", shards.sharding(0))
            yield wrap(name, "a norm over the columns of all ranks", make)
            return
        if role is Role.EMBEDDING:
            check_adoptable(module, self.axis.size)
            yield self._keep(name, "weight", shards.sharding(0))
            adopt = partial(VocabParallelEmbedding.adopt, module, self.topology)
            yield Change("sets", name, "__class__: vocabulary-parallel", adopt)
            return
        is_row = role in ROW_ROLES
        weight = module.get_parameter("weight")
        bias = dict(module.named_parameters(recurse=False)).get("bias")
        form = WeightLayout(kinds.output_dim(module) == 1, shards.outputs(self.axis.rank), shards=shards.lengths)
        if not shards.whole:
            yield self._keep(name, "weight", shards.sharding(_dim(module, not is_row)))
            if bias is not None and not is_row:
                yield self._keep(name, "bias", shards.sharding(0))
        inside = role is not Role.HEAD and self.plan.around(name, *REGION_ROLES) is not None
        if is_row:
            yield self._put(name, "row-parallel linear", lambda: RowLinear(weight, bias, self.axis, form))
        else:
            # The inputs of a head are whole hidden states, also with sequence parallelism.
            axis = replace(self.axis, sequence_parallel=False) if role is Role.HEAD else self.axis
            yield self._put(name, "column-parallel linear", lambda: ColumnLinear(weight, bias, axis, form, inside))
        if role is Role.HEAD:
            if name == layer:
                yield from self._shard_logits(name, shards.sharding(0))
        elif self.axis.sequence_parallel and (is_row or not inside):
            yield wrap(name, "hidden states are checked", partial(self._expect_sequences, name))

    def _shard_logits(self, head: str, vocabulary: Sharding) -> Iterator[Change]:
        owner = names.owner(head)
        heads = [head, *(each for each in self.plan.named(Role.LORA_B) if self.plan.adapted(each) == head)]

        def make() -> None:
            shard_logits(self.modules[owner], [self.modules[each] for each in heads], vocabulary, self.topology)

        for index, each in enumerate(heads):
            yield wrap(each, "logits of this rank's words", None if index else make)
        if has_causal_lm_loss(self.modules[owner]) and owner not in self.linked:
            self.linked.add(owner)
            yield wrap(owner, "logits stay sharded in training on labels", None)
            yield Change("links", owner, "vocabulary-parallel loss", level=LossLevel.VOCABULARY)

    def _expect_sequences(self, name: str) -> None:
        """Make a linear at a region's border raise ValueError for flattened hidden states, which have no shards."""

        def checked(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            check_sequences(x, name)
            return forward(x)

        wrap_forward(self.modules[name], checked, Level.REGION)

    def _adapters(self) -> Iterator[Change]:
        for name in adapted_layers(self.plan):
            outer = with_adapter(name)
            role = self.plan.roles[name]
            if role is Role.EMBEDDING:
                make = partial(keep_padding, self.modules[outer], self.modules[name])
                yield Change("sets", outer, "_embed", make)
            elif role in (Role.LATENT, *COLUMN_ROLES) and self.plan.around(name, *REGION_ROLES) is not None:
                make = partial(enter_by_factors, self.modules[outer], self.axis, self.regions.outside)
                for index, child in enumerate(entered_factors(self.modules[outer])):
                    # The first change makes all.
                    yield wrap(f"{outer}.{child}", "computed before the region", None if index else make)

    def _put(self, name: str, what: str, made: Callable[[], nn.Module]) -> Change:

        def put() -> None:
            parent, _, leaf = name.rpartition(".")
            module = made()
            module.train(self.modules[name].training)
            self.modules[name] = module
            setattr(self.modules[parent], leaf, module)

        return Change("replaces", name, what, put)

    def _localise(self, name: str) -> Iterator[Change]:
        """Set the numbers of heads that an attention module stores to those of this rank."""
        shape = self.plan.attentions[name]
        module = self.modules[name]
        local = local_heads(shape, self.axis.size)[self.axis.rank]
        heads = len(local.queries)
        kv_heads = len(local.key_values)
        counts = dict.fromkeys(HEADS, heads) | dict.fromkeys(KEY_VALUE_HEADS, kv_heads)
        of_all = (*OF_ALL_HEADS, "hidden_size") if type(module).__name__ == "DbrxAttention" else OF_ALL_HEADS
        counts |= dict.fromkeys(of_all, heads * shape.head_dim) | {"kv_dim": kv_heads * shape.head_dim}
        for key, count in (counts | {"num_key_value_groups": heads // kv_heads}).items():
            if attribute(module, key, int) not in (None, count):
                yield Change("sets", name, key, partial(set_attribute, module, key, count))
        if takes_biases(module):
            make = partial(take_own_biases, module, shape.heads, local.queries)
            yield wrap(name, "biases of its own heads", make)
        by_head = [parameter for parameter, sizes in kinds.own_shapes(module).items() if sizes == (shape.heads,)]
        for parameter in by_head:
            yield self._keep(name, parameter, even_shards(shape.heads, self.axis.size).sharding(0))
        if by_head:
            yield wrap(name, "numbers of its own heads", partial(use_own_numbers, module, by_head))
        if config_of(module) is not None and self.plan.inside(name, Role.QUERY_KEY_VALUE):
            yield Change("sets", name, "config", partial(_give_own_config, module, heads, kv_heads))

    @cached_property
    def hidden(self) -> tuple[int, ...]:
        """The shape of one hidden state: the outputs of the first linear that ends a sublayer; empty without one."""
        rows = (module for _, module in self._of(Role.ATTENTION_OUTPUT, Role.DOWN))
        return next(((kinds.sizes(each)[1],) for each in rows), ())

    def _sum_partial_gradients(self) -> Iterator[Change]:
        """Sum over the ranks the gradients of whole weights that each rank uses for its heads or sequence shard."""
        for name, parameter in self.model.named_parameters():
            layer = self.plan.adapted(names.parent(name)) or names.parent(name)
            of_experts = self.plan.of(layer) is Role.EXPERTS or self.plan.around(layer, Role.EXPERTS) is not None
            # GPT-NeoX-Japanese adds a bias behind the output, where results are those of all ranks.
            behind = self.plan.of(names.parent(name)) in REGION_ROLES and parameter.shape == self.hidden
            whole = name not in self.sharded and not of_experts and not behind
            if whole and self.regions.is_partial(names.parent(name)):
                make = partial(sum_gradient, parameter, self.axis.group)
                yield Change("hooks", name, "the gradient is summed over tp", make)


def _give_own_config(attention: nn.Module, heads: int, kv_heads: int) -> None:
    """Give ``attention`` a config with this rank's heads: Phi-3 reads there where its fused projection's parts end."""
    local_config = copy.copy(config_of(attention))
    assert local_config is not None
    local_config.num_attention_heads = heads
    local_config.num_key_value_heads = kv_heads
    set_attribute(attention, "config", local_config)


def _dim(module: nn.Module, outputs: bool) -> int:
    """The dim of ``module``'s weight that its outputs, or else its inputs, run along."""
    return kinds.output_dim(module) if outputs else 1 - kinds.output_dim(module)
