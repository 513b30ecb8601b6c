"""PEFT's adapters of experts (``target_parameters``): each rank keeps the factors of its own experts.

PEFT 0.21 wraps the module once for each parameter that is adapted and, within its forward, adds the product of the
factors to the parameter (peft.tuners.lora.layer.ParamWrapper.get_delta_weight): A [E * r, in], expert by expert, and
B [out, r * E], one row of all experts after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from torch import nn

from ds_npu.features.declaration import Change
from ds_npu.models import names
from ds_npu.models.attributes import attribute, set_attribute
from ds_npu.parallel.placement import keep_expert_shard
from ds_npu.parallel.tensor.sharding import Sharding, near_even, shard_sections
from ds_npu.topology.topology import Topology

COUNT = "num_experts"


def adapter_changes(model: nn.Module, experts: str, count: int, topology: Topology) -> Iterator[Change]:
    """Shard the factors of the adapters around the module ``experts`` of ``count`` experts over ep.

    Raises ValueError for adapters that are not known, and where ranks share the columns of an expert.
    """
    modules: Mapping[str, nn.Module] = dict(model.named_modules())
    outer = experts
    while outer.endswith(f".{names.BASE_LAYER}"):
        outer = outer.removesuffix(f".{names.BASE_LAYER}")
        wrapper = modules[outer]
        found = attribute(wrapper, COUNT, int)
        if topology.size("etp") > 1 or found != count:
            why = "ranks share each expert" if found == count else f"{type(wrapper).__name__} is not known"
            raise ValueError(
                f"ds_npu.parallel.expert: {outer} has an adapter, and {why}. What to do: expert_tensor 1 and LoRA by "
                "target_parameters, or adapters of other modules"
            )
        for name in (f"{outer}.lora_A", f"{outer}.lora_B"):
            for adapter, linear in modules[name].named_children():
                yield _shard(f"{name}.{adapter}.weight", linear.get_parameter("weight"), count, topology)
        yield Change("sets", outer, COUNT, partial(set_attribute, wrapper, COUNT, count // topology.size("ep")))


def _shard(name: str, factor: nn.Parameter, count: int, topology: Topology) -> Change:
    ep, is_first = topology.size("ep"), ".lora_A." in name
    rows = factor.shape[0 if is_first else 1]
    if is_first:
        sharding = shard_sections(0, [rows], ep, unit=rows // count)
    else:
        parts = near_even(count, ep)
        ranges = tuple(
            tuple((row * count + start, row * count + stop) for row in range(rows // count)) for start, stop in parts
        )
        sharding = Sharding(1, rows, ranges)
    said = f"dim {sharding.dim} over ep: {sharding.length(topology.rank('ep')):,} of {rows:,}"
    make = partial(keep_expert_shard, factor, {"ep": sharding}, {"ep": topology.rank("ep")})
    return Change("shards", name, said, make)
