"""Muon on whole matrices, in place of DeepSpeed's own Muon inside of its optimizers.

DeepSpeed 0.19.8 orthogonalises in three places: in the inner optimizer without ZeRO, and in ZeRO 1 to 3 in its own code
before the norm of gradients is taken and they are clipped, each on what a rank holds. Here DeepSpeed's ZeRO sees an
optimizer that it does not know as Muon: it takes the norm of gradients, clips them, and calls a step. The momentum is
state of what is stepped, shards and partitions alike, so that checkpoints keep their form, and a step that is skipped
leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from ds_npu.config.whole_matrices import BY_ELEMENT, MUON
from ds_npu.ops.orthogonalisation import COEFFICIENTS, Coefficients, Method, Scale, orthogonalised, update_scale
from ds_npu.parallel.whole_matrices.exchange import MatrixExchange
from ds_npu.parallel.whole_matrices.pieces import Matrix

ITERATION_DTYPES: dict[Method, torch.dtype] = {"gram": torch.float16, "standard": torch.bfloat16}
"""DeepSpeed's dtypes; float32 on devices without them. Weights in float64 are iterated in float64."""
MOMENTUM = "momentum_buffer"
"""DeepSpeed's key of the momentum in the state of a stepped tensor."""


@dataclass(frozen=True)
class MatrixSettings:
    """The settings of the section that all matrices of an engine share."""

    scale: Scale = "aspect"
    coefficients: Coefficients = COEFFICIENTS["jordan"]


class MomentumRun(NamedTuple):
    """Elements of a weight in a partition of ZeRO 1 or 2, of which DeepSpeed has the whole shard's momentum."""

    start: int
    """Index of the first element in the partition."""
    first: int
    """Index of the first element in the shard, flat."""
    numel: int
    shard: int
    """Elements of the shard."""


@dataclass(frozen=True)
class MatrixPortion:
    """Tensors that are stepped together, and the exchange of the matrices in them."""

    tensors: Sequence[torch.Tensor]
    exchange: MatrixExchange
    runs: Sequence[MomentumRun] | None = None
    """The runs of the one tensor, in its order, in ZeRO 1 and 2; None elsewhere."""


def iteration_dtype(method: Method, weights: torch.dtype) -> torch.dtype:
    """The dtype in which matrices of ``weights``' dtype are iterated."""
    if weights == torch.float64:
        return weights
    dtype = ITERATION_DTYPES[method]
    accelerator = get_accelerator()
    supported = {torch.float16: accelerator.is_fp16_supported, torch.bfloat16: accelerator.is_bf16_supported}
    return dtype if dtype not in supported or supported[dtype]() else torch.float32


class MatrixOptimizer(torch.optim.Optimizer):
    """Steps whole matrices for DeepSpeed's MuonWithAuxAdam, with its groups and state; Adam's half is DeepSpeed's.

    DeepSpeed would know its own Muon by the class, and by "muon" in a name.
    """

    def __init__(self, inner: Any, settings: MatrixSettings) -> None:
        """``inner``: the MuonWithAuxAdam."""
        super().__init__(inner.param_groups, {})
        self.inner, self.settings = inner, settings
        self.param_groups = inner.param_groups
        self.state = inner.state
        for group in self.param_groups:
            group[BY_ELEMENT] = True
        self._portions: dict[int, MatrixPortion] | None = None

    def use(self, portions: Iterable[MatrixPortion]) -> None:
        """Orthogonalise the matrices of ``portions`` from now on."""
        self._portions = {id(each.tensors[0]): each for each in portions}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of DeepSpeed's Muon at the same layout."""
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups
        self.inner.state = self.state
        other = self.inner.aux_optimizer
        for group in self.param_groups:
            if not group[MUON]:
                for key, value in ({} if other is None else other.defaults).items():
                    group.setdefault(key, value)
            elif not group.get(BY_ELEMENT) and group["params"]:
                self._reorder_momenta(group["params"])
            group[BY_ELEMENT] = True

    def _reorder_momenta(self, tensors: Sequence[torch.Tensor]) -> None:
        runs = self._portion(tensors).runs
        state = self.state[tensors[0]]
        found = state.get(MOMENTUM)
        momentum = torch.zeros_like(tensors[0])
        begin = 0
        if found is None or (runs is None and found.shape == momentum.shape):
            return
        if runs is None or found.numel() != sum(run.shard for run in runs):
            raise ValueError(
                f"{MOMENTUM} of DeepSpeed's Muon has {found.numel()} elements, which is not what this rank's partition "
                f"of {momentum.numel()} elements has of the weights. What to do: load the checkpoint at the layout "
                "that wrote it; or load_optimizer_states=False"
            )
        for run in runs:
            whole = found.view(-1)[begin : begin + run.shard]
            momentum[run.start : run.start + run.numel] = whole[run.first : run.first + run.numel]
            begin += run.shard
        state[MOMENTUM] = momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the groups that are set now, in ZeRO 1 to 3 one at a time; all ranks of a stage call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._portions is None:
            # DeepSpeed steps zeros to make state (fp16/unfused_optimizer.py), by which weights decay and Adam counts.
            return loss
        for group in self.param_groups:
            if group[MUON] and group["params"]:
                self._step_matrices(group)
        others = [group for group in self.param_groups if not group[MUON]]
        if others:
            # A client's own schedule may use the inner optimizer, which must have all groups again.
            groups = self.inner.param_groups
            self.inner.param_groups = others
            self.inner.state = self.state
            try:
                self.inner.step()
            finally:
                self.inner.param_groups = groups
        return loss

    def _step_matrices(self, group: Mapping[str, Any]) -> None:
        tensors: list[torch.Tensor] = group["params"]
        for tensor in tensors:
            # Every rank takes part in every exchange; DeepSpeed steps weights without a gradient in the same way.
            tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()
            if MOMENTUM not in self.state[tensor]:
                self.state[tensor][MOMENTUM] = torch.zeros_like(tensor)
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        momenta = [self.state[tensor][MOMENTUM] for tensor in tensors]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        torch._foreach_lerp_(gradients, momenta, group["momentum"])
        self._orthogonalise(gradients, group, self._portion(tensors))
        torch._foreach_mul_(tensors, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(tensors, gradients, alpha=-group["lr"])

    def _portion(self, tensors: Sequence[torch.Tensor]) -> MatrixPortion:
        found = None if self._portions is None else self._portions.get(id(tensors[0]))
        if found is None or len(found.tensors) != len(tensors):
            raise RuntimeError(
                "optimizer.type Muon: the optimizer steps weights that it did not have when the engine was made "
                "(add_param_group). What to do: deepspeed.initialize again, with all weights that are trained now"
            )
        return found

    def _orthogonalise(
        self, gradients: Sequence[torch.Tensor], group: Mapping[str, Any], portion: MatrixPortion
    ) -> None:
        method: Method = group["ns_method"]
        dtype = iteration_dtype(method, gradients[0].dtype)
        # The standard iteration rounds gradients first: rounding them before they are sent changes nothing.
        sent = dtype if method == "standard" else gradients[0].dtype

        def iteration(first: Matrix, x_BRC: torch.Tensor) -> torch.Tensor:
            rows_columns = first.aspect if self.settings.scale == "aspect" else (first.rows, first.columns)
            found = orthogonalised(x_BRC, method, dtype, self.settings.coefficients)
            return found.mul_(update_scale(self.settings.scale, *rows_columns))

        flats = [gradient.view(-1) for gradient in gradients]
        portion.exchange.orthogonalise(flats, flats[0].new_empty(0, dtype=sent), iteration, dtype)
