"""PEFT's adapters of experts (``target_parameters``): each rank keeps the parts of the factors that its experts need.

PEFT 0.21 wraps the module once for each parameter that is adapted and, within its forward, adds the product of the
factors to the parameter (peft.tuners.lora.layer.ParamWrapper.get_delta_factors): A [E * r, in], expert by expert, and
B [out, r * E], one number of the adapter's rank after the other. Over ``ep`` both are sharded by experts. Where ``etp``
ranks share each expert, the factor that has the weight's sharded dim is sharded likewise. The product needs the whole
other factor: each rank keeps an even shard of it and gathers it in forward; its gradients are summed and sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ds_npu.comm.crossing import gather
from ds_npu.features.declaration import Change
from ds_npu.features.modules.expert_layout import Layout, expert_shard
from ds_npu.models import names
from ds_npu.models.attributes import attribute, set_attribute
from ds_npu.parallel.tensor.sharding import Sharding, near_even, shard_sections
from ds_npu.topology.degrees import Axis
from ds_npu.topology.topology import Topology

COUNT = "num_experts"
FIRST, SECOND = "lora_A", "lora_B"


def adapter_changes(model: nn.Module, experts: str, layout: Layout, topology: Topology) -> Iterator[Change]:
    """Shard the factors of the adapters around the module ``experts``.

    Raises ValueError for unknown adapters, and for factors that the ``etp`` ranks do not divide.
    """
    modules: Mapping[str, nn.Module] = dict(model.named_modules())
    outer = experts
    while outer.endswith(f".{names.BASE_LAYER}"):
        outer = outer.removesuffix(f".{names.BASE_LAYER}")
        wrapper = modules[outer]
        if attribute(wrapper, COUNT, int) != layout.count:
            raise ValueError(
                f"ds_npu.parallel.expert: {outer} has an adapter, and {type(wrapper).__name__} is not known. What to "
                "do: LoRA by target_parameters, or adapters of other modules"
            )
        factors = _Factors(wrapper, layout, topology)
        for leaf in (FIRST, SECOND):
            for adapter, linear in modules[f"{outer}.{leaf}"].named_children():
                name = f"{outer}.{leaf}.{adapter}.weight"
                factor = linear.get_parameter("weight")
                yield expert_shard(name, factor, factors.shardings(name, factor, leaf), topology)
        yield Change("sets", outer, f"{COUNT}, get_delta_factors, get_delta_weight", factors.install)


@dataclass(frozen=True)
class _Factors:
    """The factors of the adapters of one parameter [E, out, in], or [E, in, out], of experts."""

    wrapper: Any
    """PEFT's ParamWrapper."""
    layout: Layout
    topology: Topology

    @cached_property
    def is_out_in(self) -> bool:
        return bool(attribute(self.wrapper, names.IS_OUT_IN, bool))

    @cached_property
    def of_weight(self) -> Sharding | None:
        """The sharding of the parameter over etp."""
        name = attribute(self.wrapper, names.PARAMETER, str)
        assert name is not None
        return self.layout.shardings(name, self.topology.size("ep"), self.topology.size("etp")).get("etp")

    @cached_property
    def gathered(self) -> str | None:
        """The factor that etp ranks gather: A, along inputs, where the weight's outputs are sharded; else B."""
        if self.of_weight is None:
            return None
        return FIRST if (self.of_weight.dim == 1) == self.is_out_in else SECOND

    def shardings(self, name: str, factor: nn.Parameter, leaf: str) -> dict[Axis, Sharding]:
        """The shardings of the ``factor`` A [E * r, in] or B [out, r * E]."""
        shape = factor.shape
        ep = self.topology.size("ep")
        etp = self.topology.size("etp")
        dim = 1 if leaf == FIRST else 0
        count = self.layout.count
        if leaf == FIRST:
            by_experts = shard_sections(0, [shape[0]], ep, unit=shape[0] // count)
        else:
            # The columns of the same experts in each number of the adapter's rank.
            starts = range(0, shape[1], count)
            ranges = tuple(tuple((at + start, at + stop) for at in starts) for start, stop in near_even(count, ep))
            by_experts = Sharding(1, shape[1], ranges)
        found: dict[Axis, Sharding] = {"ep": by_experts}
        if self.of_weight is None:
            return found
        if leaf != self.gathered:
            return found | {"etp": replace(self.of_weight, dim=dim)}
        if shape[dim] % etp:
            raise ValueError(
                f"ds_npu.parallel.expert_tensor: found {etp}; {name} has {shape[dim]} numbers of each expert and rank "
                f"of the adapter. What to do: a divisor of {shape[dim]}"
            )
        return found | {"etp": shard_sections(dim, [shape[dim]], etp)}

    def install(self) -> None:
        """Make the wrapper compute the product for this rank's experts and columns."""
        set_attribute(self.wrapper, COUNT, self.layout.count // self.topology.size("ep"))
        set_attribute(self.wrapper, "get_delta_factors", self.factors)
        set_attribute(self.wrapper, "get_delta_weight", self.weight)

    def factors(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        """(left [E, n, r], right [E, r, m], scaling) of this rank; their product is added to the parameter."""
        a = self._whole(FIRST, self.wrapper.lora_A[adapter].weight)
        b = self._whole(SECOND, self.wrapper.lora_B[adapter].weight)
        count = self.layout.count // self.topology.size("ep")
        dtype = self.wrapper.get_param().dtype
        a_ErK = a.reshape(count, -1, a.shape[1]).to(dtype)
        b_ENr = b.reshape(b.shape[0], -1, count).permute(2, 0, 1).to(dtype)
        scaling: float = self.wrapper.scaling[adapter]
        return (b_ENr, a_ErK, scaling) if self.is_out_in else (a_ErK.mT, b_ENr.mT, scaling)

    def weight(self, adapter: str) -> torch.Tensor:
        """The product that is added to the parameter."""
        left, right, scaling = self.factors(adapter)
        return left @ right * scaling

    def _whole(self, leaf: str, factor: torch.Tensor) -> torch.Tensor:
        dim = 1 if leaf == FIRST else 0
        return gather(factor, dim, self.topology.group("etp")) if leaf == self.gathered else factor
