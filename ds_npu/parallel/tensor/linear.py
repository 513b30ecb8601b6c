"""Linear layers whose weight is split over the tensor ranks (Megatron-LM, arXiv 1909.08053 and 2205.05198).

Shape letters: B batch, S sequence, s = S / tp, K inputs, N outputs (of this rank, where they are split).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ds_npu.comm.collectives import all_gather, all_reduce
from ds_npu.parallel.tensor.axis import SEQUENCE_DIM, OneAfterTheOther, TensorAxis, tensor_axis, total
from ds_npu.parallel.tensor.gradient import sum_gradient
from ds_npu.parallel.tensor.region import RegionInput, padded
from ds_npu.parallel.tensor.sharding import Ranges, keep_part, split
from ds_npu.parallel.tensor.weight_gradient import MARK, GradientBuffer, gradient_buffer, weight_gradient
from ds_npu.parallel.tensor.whole_weight import ShowsWhole
from ds_npu.topology.topology import Topology


@dataclass(frozen=True)
class Form:
    """How a weight stands in memory."""

    transposed: bool = False
    """[K, N] (GPT-2's Conv1D) in place of [N, K]."""
    outputs: Ranges | None = None
    """The outputs that are computed of a weight that is whole on every rank; one may stand in it twice."""

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """What of ``weight`` is used, [K, N]; a view where it is one range."""
        matrix = weight if self.transposed else weight.t()
        return matrix if self.outputs is None else torch.cat(self._pieces(matrix), dim=-1)

    def used(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """What of ``bias`` is used, [N]."""
        return bias if bias is None or self.outputs is None else torch.cat(self._pieces(bias), dim=-1)

    def weight_gradient(
        self, weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, buffer: GradientBuffer | None
    ) -> torch.Tensor | None:
        """The gradient of ``weight`` from [..., K] and [..., N]; None where it was added to the ``buffer``."""
        x, dy = _rows(x), _rows(dy)
        if self.outputs is None:
            return weight_gradient(buffer, x, dy) if self.transposed else weight_gradient(buffer, dy, x)
        whole = torch.zeros_like(weight)
        self._add(whole if self.transposed else whole.t(), x.t() @ dy)
        return whole

    def bias_gradient(self, bias: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """The gradient of ``bias`` from [..., N]."""
        gradient = _rows(dy).sum(dim=0)
        if self.outputs is None:
            return gradient
        whole = torch.zeros_like(bias)
        self._add(whole, gradient)
        return whole

    def _pieces(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole.narrow(-1, start, stop - start) for start, stop in self.outputs or ()]

    def _add(self, whole: torch.Tensor, used: torch.Tensor) -> None:
        pieces = self._pieces(whole)
        lengths = [each.shape[-1] for each in pieces]
        for piece, part in zip(pieces, torch.split(used, lengths, dim=-1), strict=True):
            piece += part


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


class _Columns(torch.autograd.Function):
    """y_i = x W_iᵀ + b_i, where x enters a region: one collective each way, whatever the number of weights.

    Backward, the collective of dx runs while the weight gradients are computed; with sequence parallelism x is gathered
    again, while dx is computed, so that only its shard was kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        axis: TensorAxis,
        forms: Sequence[Form],
        stacked: bool,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...] | torch.Tensor:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.axis, ctx.forms, ctx.stacked = axis, forms, stacked
        # Not what is saved, whose place another tensor may take (activation checkpointing).
        ctx.buffers = [None if weight is None else gradient_buffer(weight) for weight in weights]
        # Of frozen weights (beside adapters) there is no gradient for which x would be kept.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[4::2]) else None, *parameters)
        used = [form.used(bias) for form, bias in zip(forms, biases, strict=True)]
        matrices = [form.matrix(weight) for form, weight in zip(forms, weights, strict=True) if weight is not None]
        return _stacked(x, axis, matrices, used) if stacked else _products(x, axis, matrices, used)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        x, *parameters = ctx.saved_tensors
        axis, forms = ctx.axis, ctx.forms
        weights, biases = parameters[::2], parameters[1::2]
        wanted = ctx.needs_input_grad[4:]
        if ctx.stacked:
            dys = dys[0].unbind(0)
        gathered = None
        if axis.sequence_parallel and any(wanted[::2]):
            gathered = all_gather(x, SEQUENCE_DIM, axis.group)
        pending = None
        if ctx.needs_input_grad[0]:
            pairs = [(dy, form.matrix(weight).t()) for dy, form, weight in zip(dys, forms, weights, strict=True)]
            if axis.sequence_parallel:
                pending = axis.collectives.matmul_scatter(pairs)
            else:
                pending = all_reduce(total(pairs), axis.group)
        inputs = x if gathered is None else gathered.wait()
        gradients: list[torch.Tensor | None] = []
        for index, (dy, form, weight, bias) in enumerate(zip(dys, forms, weights, biases, strict=True)):
            gradients.append(
                form.weight_gradient(weight, inputs, dy, ctx.buffers[index]) if wanted[2 * index] else None
            )
            gradients.append(form.bias_gradient(bias, dy) if wanted[2 * index + 1] else None)
        return (pending.wait() if pending else None, None, None, None, *gradients)


Operands = Sequence[torch.Tensor]


def _products(
    x: torch.Tensor, axis: TensorAxis, matrices: Operands, biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """[B, S, N_i] of each of ``matrices``."""
    if not axis.sequence_parallel:
        return tuple(functional.linear(x, matrix.t(), bias) for matrix, bias in zip(matrices, biases, strict=True))
    _, outputs = axis.collectives.gather_matmul(x, matrices, gathered=False)
    for output, bias in zip(outputs, biases, strict=True):
        if bias is not None:
            output += bias
    return tuple(outputs)


def _stacked(
    x: torch.Tensor, axis: TensorAxis, matrices: Operands, biases: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """[n, B, S, N] of ``matrices`` of one size, each written into its place."""
    if axis.sequence_parallel and not isinstance(axis.collectives, OneAfterTheOther):
        # Products in pieces or in one kernel with their collective choose where they write.
        return torch.stack(_products(x, axis, matrices, biases))
    if axis.sequence_parallel:
        x = all_gather(x, SEQUENCE_DIM, axis.group).wait()
    out = x.new_empty(len(matrices), *x.shape[:-1], matrices[0].shape[1])
    for place, matrix, bias in zip(out.flatten(1, -2), matrices, biases, strict=True):
        if bias is None:
            torch.mm(x.flatten(0, -2), matrix, out=place)
        else:
            torch.addmm(bias, x.flatten(0, -2), matrix, out=place)
    return out


class _Row(torch.autograd.Function):
    """y = x Wᵀ summed over the tensor ranks, each of which has some of the inputs: where a region ends."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: TensorAxis, form: Form, weight: torch.Tensor) -> torch.Tensor:
        ctx.axis, ctx.form, ctx.buffer = axis, form, gradient_buffer(weight)
        ctx.save_for_backward(x if ctx.needs_input_grad[3] else None, weight)
        pair = (x, form.matrix(weight))
        if axis.sequence_parallel:
            return axis.collectives.matmul_scatter([pair]).wait()
        return all_reduce(total([pair]), axis.group).wait()

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        axis, form, dy = ctx.axis, ctx.form, dys[0].contiguous()
        matrix = form.matrix(weight).t()
        if axis.sequence_parallel:
            dy, (dx,) = axis.collectives.gather_matmul(dy, [matrix], gathered=ctx.needs_input_grad[3])
        else:
            dx = torch.matmul(dy, matrix)
        wanted = ctx.needs_input_grad[3]
        return dx, None, None, form.weight_gradient(weight, x, dy, ctx.buffer) if wanted else None


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b on one rank, whose weight has a gradient buffer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, form: Form, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.form, ctx.buffer = form, gradient_buffer(weight)
        ctx.save_for_backward(x, weight, bias)
        return functional.linear(x, form.matrix(weight).t(), form.used(bias))

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        (x, weight, bias), form, dy = ctx.saved_tensors, ctx.form, dys[0]
        wanted = ctx.needs_input_grad
        dx = torch.matmul(dy, form.matrix(weight).t()) if wanted[0] else None
        gradient = form.weight_gradient(weight, x, dy, ctx.buffer) if wanted[2] else None
        return dx, None, gradient, form.bias_gradient(bias, dy) if wanted[3] else None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: Form) -> torch.Tensor:
    """[..., K] to [..., N], with the whole weight of this rank."""
    plain = type(x) in (torch.Tensor, nn.Parameter)  # A tensor of another kind says itself how it is multiplied.
    if not plain or torch.compiler.is_compiling() or gradient_buffer(weight) is None or not weight.requires_grad:
        return functional.linear(x, form.matrix(weight).t(), form.used(bias))
    x, weight, bias = _cast(x, weight, bias)  # type: ignore[assignment]
    function: Any = _Linear  # torch's apply has no types
    y: torch.Tensor = function.apply(x, form, weight, bias)
    return y


def _cast(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """What autocast makes of the operands of a linear layer; our autograd functions are outside of its sight."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [None if tensor is None else _to(tensor, dtype) for tensor in tensors]


def _to(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in ``dtype``, with its gradient buffer, into which the gradient is then added without a cast."""
    cast = tensor.to(dtype)
    if buffer := gradient_buffer(tensor):
        vars(cast)[MARK] = buffer
    return cast


class ColumnLinear(ShowsWhole):
    """A linear layer of whose outputs this rank has some.

    ``inside`` says that hidden states given as a plain tensor are in the region already; they enter it here else.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, axis: TensorAxis, form: Form, inside: bool
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.axis, self.form, self.inside = axis, form, inside
        self.together = Projections([self])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, K], or its shard [B, s, K], to [B, S, N]."""
        if isinstance(x, RegionInput):
            return self.together.output(self, x)
        if self.inside:
            return linear(x, self.weight, self.bias, self.form)
        output: torch.Tensor = columns([self], x)[0]
        return output

    def extra_repr(self) -> str:
        inputs, outputs = self.form.matrix(self.weight).shape
        return f"{inputs} -> {outputs} on tensor rank {self.axis.rank} of {self.axis.size}"


def columns(layers: Sequence[ColumnLinear], x: torch.Tensor, stacked: bool = False) -> Any:
    """The outputs of ``layers`` for one ``x`` from outside of the region: a tuple, or [n, B, S, N] if ``stacked``."""
    x, *parameters = _cast(x, *(each for layer in layers for each in (layer.weight, layer.bias)))  # type: ignore[assignment]
    function: Any = _Columns  # torch's apply has no types
    return function.apply(x.contiguous(), layers[0].axis, [layer.form for layer in layers], stacked, *parameters)


class Projections:
    """Column linears that a module calls one after another with the same hidden states (query, key and value).

    The first call computes the outputs of all, so that hidden states enter the region once.
    """

    def __init__(self, layers: Sequence[ColumnLinear]) -> None:
        self.layers = list(layers)
        self._input: RegionInput | None = None
        self._outputs: dict[int, torch.Tensor] = {}

    def output(self, layer: ColumnLinear, x: RegionInput) -> torch.Tensor:
        index = next(place for place, each in enumerate(self.layers) if each is layer)
        if x is not self._input or index not in self._outputs:
            outputs = columns(self.layers, x.source)
            self._input, self._outputs = x, {place: x.cut(output) for place, output in enumerate(outputs)}
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        return output

    def stacked(self, x: RegionInput) -> torch.Tensor:
        """The outputs of all layers in one tensor, [n, B, S, N]."""
        outputs: torch.Tensor = columns(self.layers, x.source, stacked=True)
        return outputs.narrow(1 + SEQUENCE_DIM, 0, x.shape[SEQUENCE_DIM])


def stacked_outputs(layers: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """The outputs of ``layers``, which are of one size, in one tensor [n, B, S, N].

    Column linears that project together write it, without being called themselves; for others it is a copy.
    """
    first = layers[0]
    if isinstance(x, RegionInput) and isinstance(first, ColumnLinear):
        together = first.together
        if [id(each) for each in together.layers] == [id(each) for each in layers]:
            return together.stacked(x)
    return torch.stack([layer(x) for layer in layers])


def project_together(layers: Sequence[ColumnLinear]) -> None:
    """Let hidden states enter the region once for all of ``layers``."""
    together = Projections(layers)
    for layer in layers:
        layer.together = together


class RowLinear(ShowsWhole):
    """A linear layer of whose inputs this rank has some; its sum over the tensor ranks leaves the region."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, axis: TensorAxis, form: Form) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.axis, self.form = axis, form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, K] to [B, S, N], or to its shard [B, ceil(S / tp), N]."""
        if self.axis.sequence_parallel:
            x = padded(x, self.axis.size)
        x, weight, bias = _cast(x, self.weight, self.bias)  # type: ignore[assignment]
        function: Any = _Row  # torch's apply has no types
        y: torch.Tensor = function.apply(x.contiguous(), self.axis, self.form, weight)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        inputs, outputs = self.form.matrix(self.weight).shape
        return f"{inputs} on tensor rank {self.axis.rank} of {self.axis.size} -> {outputs}"


class ColumnParallelLinear(ColumnLinear):
    """``nn.Linear`` split along its outputs, for models that are written with tensor parallelism.

    Takes hidden states that are the same on every tensor rank, [B, S, in_features] (with ``sequence_parallel``, this
    rank's shard of the sequence), and returns this rank's [B, S, out_features / tp]. A new one has the numbers that
    nn.Linear draws from the same seed: they are drawn whole, and cut. Raises ValueError where there are fewer outputs
    than ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        topology: Topology,
        bias: bool = True,
        sequence_parallel: bool = False,
        **factory: Any,
    ) -> None:
        axis = tensor_axis(topology, sequence_parallel)
        sharding = split(0, [out_features], axis.size)
        weight, offset = _initial(in_features, out_features, bias, factory)
        keep_part(weight, sharding, axis.rank)
        if offset is not None:
            keep_part(offset, sharding, axis.rank)
        super().__init__(weight, offset, axis, Form(), inside=False)


class RowParallelLinear(RowLinear):
    """``nn.Linear`` split along its inputs: what follows a ColumnParallelLinear.

    Takes this rank's [B, S, in_features / tp] and returns [B, S, out_features], the same on every tensor rank (with
    ``sequence_parallel``, this rank's shard of the sequence). The bias is whole on every rank. Raises ValueError where
    there are fewer inputs than ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        topology: Topology,
        bias: bool = True,
        sequence_parallel: bool = False,
        **factory: Any,
    ) -> None:
        axis = tensor_axis(topology, sequence_parallel)
        sharding = split(1, [in_features], axis.size)
        weight, offset = _initial(in_features, out_features, bias, factory)
        keep_part(weight, sharding, axis.rank)
        if offset is not None and axis.sequence_parallel:
            sum_gradient(offset, axis.group)
        super().__init__(weight, offset, axis, Form())


def _initial(
    in_features: int, out_features: int, bias: bool, factory: dict[str, Any]
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """The whole weight and bias that nn.Linear draws; seeded alike, every rank draws the same."""
    whole: Any = nn.Linear(in_features, out_features, bias, **factory)
    return whole.weight, whole.bias if bias else None
