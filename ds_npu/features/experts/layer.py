"""The forward of one module of experts, from its tokens to the sums of their experts' outputs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace

import torch
from torch import nn

from ds_npu.features.experts.capacity import CapacityLimit
from ds_npu.features.modules.expert_layout import Layout
from ds_npu.features.modules.listed_experts import LISTED_LAYOUT, ListedLayout
from ds_npu.features.modules.scaled_inputs import Run
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.capacity import compute_in_shares
from ds_npu.parallel.expert.dispatch import ExpertOptions, Piece
from ds_npu.parallel.expert.expert_map import MappedExperts
from ds_npu.parallel.expert.experts import compute_experts
from ds_npu.parallel.expert.weights import ExpertWeights
from ds_npu.parallel.runtime.forward_wraps import replace_innermost_forward
from ds_npu.parallel.tensor.direct_layers import PRODUCT, USES_SINK


def compute_experts_at_once(
    piece: Piece, experts: ExpertWeights, axis: ExpertAxis, options: ExpertOptions
) -> torch.Tensor:
    """``compute_experts`` with tokens, ids and weights as one ``piece``."""
    return compute_experts(*piece, experts, axis, options)


@dataclass(frozen=True)
class ExpertLayer:
    """How the experts of one layer compute over ``axis``."""

    layout: Layout
    axis: ExpertAxis
    run: Run
    mapped: MappedExperts | None = None
    capacity: CapacityLimit | None = None

    def compute_in(self, module: nn.Module) -> None:
        """Make the forward of ``module`` (tokens [T, H], experts [T, K], routing weights [T, K]) compute so."""
        parameters = list(inspect.signature(module.forward).parameters)[:3]

        def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            x, ids, weights = (*args, *(kwargs[each] for each in parameters[len(args) :]))
            experts = self.layout.weights(module, self.axis)
            kind = x.device.type
            if (product := PRODUCT.get(module)) is not None:
                experts = replace(experts, product=product)
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else experts.up.dtype
            out = self._computed((x.flatten(0, -2).to(dtype), ids, weights), experts.to(dtype), module.training)
            return out.view_as(x).to(x.dtype)

        replace_innermost_forward(module, forward)
        if isinstance(self.layout, ListedLayout):
            LISTED_LAYOUT.set(module, self.layout)
        for leaf in self.layout.sinks:
            USES_SINK.set(module.get_parameter(leaf), True)

    def _computed(self, piece: Piece, experts: ExpertWeights, is_training: bool) -> torch.Tensor:
        def compute(x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
            if self.mapped is not None:
                ids_TK = self.mapped.slots(ids_TK)
            return self.run((x_TH, ids_TK, weights_TK), experts)

        def compute_all(x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
            if self.axis.same_tokens is None:
                return compute(x_TH, ids_TK, weights_TK)
            return compute_in_shares(compute, x_TH, ids_TK, weights_TK, self.axis.same_tokens)

        x_TH, ids_TK, weights_TK = piece
        if self.capacity is not None:
            ids_TK = self.capacity.within(ids_TK, weights_TK)
        if self.mapped is not None and is_training:
            self.mapped.count(ids_TK)
        if self.capacity is None:
            return compute_all(x_TH, ids_TK, weights_TK)
        return self.capacity.compute(compute_all, x_TH, ids_TK, weights_TK, self.axis)
