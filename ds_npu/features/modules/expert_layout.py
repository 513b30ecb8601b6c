"""The modules of a model that hold experts, and their layout: by transformers' description, or by the plan's role.

transformers 5 gives every module of experts, whose forward takes (tokens [T, H], experts [T, K], weights [T, K]), the
attributes that say how its weights are stored (``integrations.moe.use_experts_implementation``).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from torch import nn
from torch.nn import functional

from ds_npu.config.roles import Role
from ds_npu.features.declaration import Change
from ds_npu.features.modules.listed_experts import ListedLayout, Mlp, gated, listed_layout
from ds_npu.features.modules.scaled_inputs import takes_scaled_inputs
from ds_npu.models import kinds
from ds_npu.models.attributes import attribute, has_attribute
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.weights import Activation, ExpertWeights, is_experts
from ds_npu.parallel.runtime.placement import keep_expert_shard
from ds_npu.parallel.tensor.sharding import Sharding, near_even, shard_sections
from ds_npu.topology.degrees import Axis
from ds_npu.topology.topology import Topology

OF_TRANSFORMERS = ("has_gate", "has_bias", "is_transposed")
ACTIVATION, GATE_METHOD = "act_fn", "_apply_gate"


@dataclass(frozen=True)
class ExpertLayout:
    """How one module holds its experts."""

    count: int
    width: int
    """I, the columns of each expert."""
    hidden: int
    has_gate: bool = True
    has_bias: bool = False
    is_transposed: bool = False
    """Whether weights are [E, in, out]; else they are [E, out, in]."""
    interleaved: bool = False
    """Whether gates and ups alternate along the outputs; else all gates, then all ups."""
    scales_inputs: bool = False
    """Whether routing weights multiply the inputs of experts (``scaled_inputs``), and not their outputs."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        found = ("gate_up_proj" if self.has_gate else "up_proj", "down_proj")
        return (*found, *(f"{each}_bias" for each in found)) if self.has_bias else found

    @property
    def sinks(self) -> tuple[str, ...]:
        """The parameters whose weight gradients may be accumulated in the optimizer's buffers."""
        return self.names[:2]

    def shardings(self, name: str, ep: int, etp: int) -> dict[Axis, Sharding]:
        """How the parameter ``name`` is sharded over ``ep`` ranks, and over the ``etp`` that share each expert."""
        found: dict[Axis, Sharding] = {"ep": shard_sections(0, [self.count], ep)}
        return found | ({"etp": self.column_sharding(name, etp)} if etp > 1 else {})

    def column_sharding(self, name: str, ranks: int) -> Sharding:
        """How the parameter ``name`` is sharded over ``ranks`` that share each expert."""
        if name == "down_proj_bias":
            # The ranks' sums add it once: each rank adds its shard.
            return shard_sections(1, [self.hidden], ranks)
        if name == "down_proj":
            return shard_sections(1 if self.is_transposed else 2, [self.width], ranks)
        dim = 1 if name.endswith("_bias") or not self.is_transposed else 2
        if self.has_gate and self.interleaved:
            return shard_sections(dim, [2 * self.width], ranks, unit=2)
        return shard_sections(dim, [self.width] * (2 if self.has_gate else 1), ranks)

    def weights(self, module: nn.Module, axis: ExpertAxis) -> ExpertWeights:
        """The experts that ``module`` holds on this rank, by its current attributes (PEFT may add to them)."""
        up, down, *biases = attrgetter(*self.names)(module)
        if biases and axis.etp > 1:
            start, stop = near_even(self.hidden, axis.etp)[axis.etp_rank]
            biases[1] = functional.pad(biases[1], (start, self.hidden - stop))
        return ExpertWeights(up, down, self.activation(module), self.is_transposed, *biases)

    def activation(self, module: nn.Module) -> Activation:
        """The function that ``module`` computes between its two products."""
        method: Activation | None = getattr(module, GATE_METHOD, None) if self.has_gate else None
        function: Activation = method or attrgetter(ACTIVATION)(module)
        return partial(gated, function) if self.has_gate and method is None else function


def is_of_transformers(module: nn.Module) -> bool:
    """Whether ``module`` holds experts and says how, as transformers' do."""
    return all(has_attribute(module, each) for each in OF_TRANSFORMERS) and is_experts(module)


Layout = ExpertLayout | ListedLayout


def expert_layouts(model: nn.Module, plan: ModelPlan) -> dict[str, Layout]:
    """The layout of each module of experts in ``model``, by name; ``plan`` may be a partial one.

    Raises ValueError for a module with a norm after its experts, or with a list of unknown experts.
    """
    planned = set(plan.named(Role.EXPERTS))
    found: dict[str, Layout] = {}
    examined: dict[Hashable, Mlp | str] = {}
    blocks: dict[Hashable, bool] = {}
    for name, module in model.named_modules():
        if name in planned and not kinds.own_shapes(module):
            found[name] = listed_layout(name, module, examined)
        elif takes_scaled_inputs(model, name, blocks):
            count, width, hidden = kinds.own_shapes(module)["down_proj"]
            found[name] = ExpertLayout(count, width, hidden, is_transposed=True, scales_inputs=True)
        elif is_of_transformers(module) or name in planned:
            found[name] = _layout(name, module)
    return found


def _layout(name: str, module: nn.Module) -> ExpertLayout:
    if attribute(module, "has_post_expert_norm", bool):
        raise ValueError(
            f"ds_npu.parallel.expert: {name} ({type(module).__name__}) has a norm behind its experts, which ds_npu "
            'does not compute on other ranks. What to do: expert 1 and expert_tensor 1, and no "moe"'
        )
    has_gate = attribute(module, "has_gate", bool) is not False
    is_transposed = bool(attribute(module, "is_transposed", bool))
    down = kinds.own_shapes(module)["down_proj"]
    interleaved = attribute(module, "is_concatenated", bool) is False
    has_bias = bool(attribute(module, "has_bias", bool))
    width, hidden = down[1:] if is_transposed else down[:0:-1]
    return ExpertLayout(down[0], width, hidden, has_gate, has_bias, is_transposed, interleaved)


def expert_shard(name: str, parameter: nn.Parameter, shardings: Mapping[Axis, Sharding], topology: Topology) -> Change:
    """Reduce ``parameter`` to this rank's columns of this rank's experts."""
    ranks = {axis: topology.rank(axis) for axis in shardings}
    parts = [
        f"dim {each.dim} over {axis}: {each.length(ranks[axis]):,} of {each.size:,}" for axis, each in shardings.items()
    ]
    return Change("shards", name, "; ".join(parts), partial(keep_expert_shard, parameter, shardings, ranks))
