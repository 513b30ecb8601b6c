"""Muon on whole matrices, in the place of DeepSpeed's inside of its optimizers.

DeepSpeed 0.19.8 orthogonalises in three places: in the inner optimizer without ZeRO, and in ZeRO 1 to 3 in its own code
before the norm of gradients is taken and they are clipped, each on what a rank holds. Here DeepSpeed's ZeRO sees an
optimizer that it does not know as Muon: it takes the norm of gradients, clips them, and calls a step. The momentum is
state of what is stepped, shards and partitions alike, so that checkpoints keep their form, and a step that is skipped
leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_npu.ops.orthogonalisation import COEFFICIENTS, Coefficients, Method, Scale, orthogonalised, update_scale
from ds_npu.parallel.whole_matrices.exchange import MatrixExchange
from ds_npu.parallel.whole_matrices.pieces import Matrix

ITERATION_DTYPES: dict[Method, torch.dtype] = {"gram": torch.float16, "standard": torch.bfloat16}
"""DeepSpeed's; float32 on devices without them. Weights in float64 are iterated in float64."""
MOMENTUM = "momentum_buffer"
"""The key of the momentum in the state of what is stepped: DeepSpeed's."""
MUON = "use_muon"
"""DeepSpeed's setting of parameter groups, and its mark of weights."""


@dataclass(frozen=True)
class MatrixSettings:
    """The settings of the section that all matrices of an engine share."""

    scale: Scale = "aspect"
    coefficients: Coefficients = COEFFICIENTS["jordan"]


@dataclass(frozen=True)
class MatrixPortion:
    """Tensors that are stepped together, and the exchange of the matrices in them."""

    tensors: Sequence[torch.Tensor]
    exchange: MatrixExchange


def iteration_dtype(method: Method, weights: torch.dtype) -> torch.dtype:
    """The dtype in which matrices of ``weights``' dtype are iterated."""
    if weights == torch.float64:
        return weights
    dtype, accelerator = ITERATION_DTYPES[method], get_accelerator()
    supported = {torch.float16: accelerator.is_fp16_supported, torch.bfloat16: accelerator.is_bf16_supported}
    return dtype if dtype not in supported or supported[dtype]() else torch.float32


class MatrixOptimizer(torch.optim.Optimizer):
    """DeepSpeed's MuonWithAuxAdam, whose groups and state it has, on whole matrices; Adam's half is DeepSpeed's.

    DeepSpeed knows its own by the class, and by "muon" in a name.
    """

    def __init__(self, inner: Any, settings: MatrixSettings) -> None:
        """``inner``: the MuonWithAuxAdam."""
        super().__init__(inner.param_groups, {})
        self.inner, self.settings = inner, settings
        self.param_groups, self.state = inner.param_groups, inner.state
        self._portions: dict[int, MatrixPortion] | None = None

    def use(self, portions: Iterable[MatrixPortion]) -> None:
        """Orthogonalise the matrices of ``portions`` from now on."""
        self._portions = {id(each.tensors[0]): each for each in portions}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the groups that there are now, DeepSpeed's ZeRO 1 to 3 one of them; all ranks of a stage call it."""
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
            # A schedule of the client's own may know the inner one, with all groups.
            groups, self.inner.param_groups = self.inner.param_groups, others
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
        # The standard iteration rounds gradients first: that they are rounded before they travel changes nothing.
        sent = dtype if method == "standard" else gradients[0].dtype

        def iteration(first: Matrix, x_BRC: torch.Tensor) -> torch.Tensor:
            rows_columns = first.aspect if self.settings.scale == "aspect" else (first.rows, first.columns)
            found = orthogonalised(x_BRC, method, dtype, self.settings.coefficients)
            return found.mul_(update_scale(self.settings.scale, *rows_columns))

        flats = [gradient.view(-1) for gradient in gradients]
        portion.exchange.orthogonalise(flats, flats[0].new_empty(0, dtype=sent), iteration, dtype)
