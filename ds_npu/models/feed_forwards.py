"""The roles of MLPs, and of routers with their experts, in a block of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping

from ds_npu.config.roles import ORDER, Role
from ds_npu.models import kinds
from ds_npu.models.attributes import has_attribute
from ds_npu.models.feed_forward_roles import GATES_FIRST, mlp_roles
from ds_npu.models.role_assigner import ORDER_UNKNOWN, RoleAssigner
from ds_npu.parallel.expert.weights import is_experts


class FeedForwards(RoleAssigner):
    """Assigns the roles of MLPs and of experts."""

    def in_feed_forward(self, name: str) -> None:
        """Assign an MLP, or a router with experts, some of which may be shared ones in an MLP of their own."""
        inner = self.tree.within(name)
        experts = [each for each in inner.values() if is_experts(self.tree.module(each))]
        if experts:
            self.assign(name, Role.MOE)
            for each in experts:
                self.experts(each)
            count = len(next(iter(self.tree.module(experts[0]).parameters(recurse=False))))
            for each in inner.values():
                module = self.tree.module(each)
                if kinds.is_linear(module) and kinds.sizes(module)[1] == count:
                    self.assign(each, Role.ROUTER)
                elif each not in experts:
                    self.in_feed_forward(each)
        elif linears := self.mlp_roles(name):
            self.in_mlp(name, linears)

    def in_mlp(self, name: str, linears: Mapping[str, Role]) -> None:
        inner = self.tree.within(name)
        norms = (self.tree.module(each) for each in inner.values() if kinds.is_norm(self.tree.module(each)))
        if any(self.hidden in shape for norm in norms for shape in kinds.own_shapes(norm).values()):
            return  # A norm of hidden states stands behind its output (Gemma 3n): it is replicated as a whole.
        self.assign(name, Role.MLP)
        for attribute, role in linears.items():
            self.linear(inner[attribute], role)
        for attribute, each in inner.items():
            if attribute not in linears:
                self.next_to_linears(each)

    def mlp_roles(self, mlp: str) -> dict[str, Role]:
        inner = self.tree.within(mlp)
        fused = GATES_FIRST.get(type(self.tree.module(mlp)).__name__)
        if fused is not None:
            return dict(zip(fused, (Role.GATE_UP, Role.DOWN), strict=True))
        styles = {attribute: self.style(name) for attribute, name in inner.items()}
        return mlp_roles({attribute: self.tree.module(name) for attribute, name in inner.items()}, styles, self.hidden)

    def next_to_linears(self, name: str) -> None:
        """Assign a norm over the columns of an MLP, or a trained activation."""
        module = self.tree.module(name)
        if kinds.is_norm(module):
            self.assign(name, Role.SHARDED_NORM)
        elif kinds.own_shapes(module) and all(sum(sizes) <= len(sizes) for sizes in kinds.own_shapes(module).values()):
            self.assign(name, Role.POINTWISE)

    def experts(self, name: str) -> None:
        # A packed gate_up_proj has all gates before all ups.
        styles = self.style(f"{name}.gate_up_proj"), self.style(f"{name}.down_proj")
        # transformers' experts say themselves how they are stored.
        module = self.tree.module(name)
        known = has_attribute(module, "is_transposed") or kinds.is_transposed(module)
        if styles == ("packed_colwise", "rowwise") or known:
            self.assign(name, Role.EXPERTS)
        else:
            self.refuse(name, f"{ORDER_UNKNOWN}; {Role.EXPERTS} means {ORDER[Role.EXPERTS]}")
