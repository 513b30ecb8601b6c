"""Column- and row-parallel linear layers: weights sharded over the tensor ranks.

Shape letters: B batch, S sequence, s = S / tp, K inputs, N outputs (of this rank, where they are sharded). Source:
Megatron-LM, arXiv:1909.08053; with sequence parallelism arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ds_npu.comm.collectives import all_gather, all_reduce
from ds_npu.ops.autograd import Context, applied
from ds_npu.parallel.runtime.placement import keep_shard
from ds_npu.parallel.tensor.axis import (
    SEQUENCE_DIM,
    Operands,
    SerialCollectives,
    TensorAxis,
    sum_of_products,
    tensor_axis,
)
from ds_npu.parallel.tensor.product import WeightLayout
from ds_npu.parallel.tensor.region import RegionInput
from ds_npu.parallel.tensor.sequence_shards import padded
from ds_npu.parallel.tensor.sharding import shard_sections
from ds_npu.parallel.tensor.weight_gradient import GRADIENT_SINK, GradientSink, gradient_sink, sum_gradient, taken
from ds_npu.parallel.tensor.whole_weight import ShowsWhole
from ds_npu.topology.topology import Topology


class _ColumnContext(Context):
    axis: TensorAxis
    layouts: Sequence[WeightLayout]
    stacked: bool
    sinks: Sequence[GradientSink | None]


class _Columns(torch.autograd.Function):
    """y_i = x W_iᵀ + b_i, where x enters a region: one collective in forward and one in backward for all weights.

    In backward the collective of dx runs while the weight gradients are computed; with sequence parallelism only the
    shard of x is kept, and x is gathered again while dx is computed. Returns every y_i, or with ``stacked`` one tensor.
    """

    @staticmethod
    def forward(
        ctx: _ColumnContext,
        x: torch.Tensor,
        axis: TensorAxis,
        layouts: Sequence[WeightLayout],
        stacked: bool,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.axis, ctx.layouts, ctx.stacked = axis, layouts, stacked
        # Saved tensors have no sinks: activation checkpointing replaces them by other tensors.
        ctx.sinks = [None if weight is None else gradient_sink(weight) for weight in weights]
        # Backward does not need x where all weights are frozen (adapters are trained instead).
        ctx.save_for_backward(x if any(ctx.needs_input_grad[4::2]) else None, *parameters)
        used = [layout.used(bias) for layout, bias in zip(layouts, biases, strict=True)]
        matrices = [each.forward(weight) for each, weight in zip(layouts, weights, strict=True) if weight is not None]
        products = _stacked if stacked else _products
        return products(x, axis, matrices, used, layouts)

    @staticmethod
    def backward(ctx: _ColumnContext, *dys: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        axis, layouts = ctx.axis, ctx.layouts
        weights, biases = parameters[::2], parameters[1::2]
        wanted = ctx.needs_input_grad[4:]
        if ctx.stacked:
            dys = dys[0].unbind(0)
        gathered = None
        if axis.sequence_parallel and any(wanted[::2]):
            gathered = all_gather(x, SEQUENCE_DIM, axis.group)
        pending = None
        if ctx.needs_input_grad[0]:
            pairs = [(dy, each.input_gradient(weight)) for dy, each, weight in zip(dys, layouts, weights, strict=True)]
            if axis.sequence_parallel:
                pending = axis.collectives.of_scatter(pairs, layouts, any(wanted[::2])).matmul_scatter(pairs)
            else:
                pending = all_reduce(sum_of_products(pairs), axis.group)
        inputs = x if gathered is None else gathered.wait()
        gradients: list[torch.Tensor | None] = []
        for index, (dy, layout, weight, bias) in enumerate(zip(dys, layouts, weights, biases, strict=True)):
            product = layout.weight_gradient(weight, inputs, dy) if wanted[2 * index] else None
            gradients.append(None if product is None else taken(ctx.sinks[index], product))
            gradients.append(layout.bias_gradient(bias, dy) if wanted[2 * index + 1] else None)
        return (pending.wait() if pending else None, None, None, None, *gradients)


_columns = applied(_Columns, _Columns.forward)


def _products(
    x: torch.Tensor,
    axis: TensorAxis,
    matrices: Operands,
    biases: Sequence[torch.Tensor | None],
    layouts: Sequence[WeightLayout],
) -> tuple[torch.Tensor, ...]:
    """The product [B, S, N_i] of ``x`` with each of ``matrices``."""
    if not axis.sequence_parallel:
        return tuple(functional.linear(x, matrix.t(), bias) for matrix, bias in zip(matrices, biases, strict=True))
    _, outputs = axis.collectives.of_gather(x, matrices, layouts, False).gather_matmul(x, matrices, gathered=False)
    for output, bias in zip(outputs, biases, strict=True):
        if bias is not None:
            output += bias
    return tuple(outputs)


def _stacked(
    x: torch.Tensor,
    axis: TensorAxis,
    matrices: Operands,
    biases: Sequence[torch.Tensor | None],
    layouts: Sequence[WeightLayout],
) -> tuple[torch.Tensor]:
    """The products [n, B, S, N] of ``x`` with ``matrices`` of one size, written into one tensor."""
    if axis.sequence_parallel:
        if not isinstance(axis.collectives.of_gather(x, matrices, layouts, False), SerialCollectives):
            # Overlapped products allocate their own outputs.
            return (torch.stack(_products(x, axis, matrices, biases, layouts)),)
        x = all_gather(x, SEQUENCE_DIM, axis.group).wait()
    out = x.new_empty(len(matrices), *x.shape[:-1], matrices[0].shape[1])
    for target, matrix, bias in zip(out.flatten(1, -2), matrices, biases, strict=True):
        if bias is None:
            torch.mm(x.flatten(0, -2), matrix, out=target)
        else:
            torch.addmm(bias, x.flatten(0, -2), matrix, out=target)
    return (out,)


class _LinearContext(Context):
    layout: WeightLayout
    sink: GradientSink | None


class _RowContext(_LinearContext):
    axis: TensorAxis


class _Row(torch.autograd.Function):
    """y = x Wᵀ summed over the tensor ranks, each of which has a shard of the inputs: where a region ends."""

    @staticmethod
    def forward(
        ctx: _RowContext, x: torch.Tensor, axis: TensorAxis, layout: WeightLayout, weight: torch.Tensor
    ) -> torch.Tensor:
        ctx.axis, ctx.layout, ctx.sink = axis, layout, gradient_sink(weight)
        ctx.save_for_backward(x if ctx.needs_input_grad[3] else None, weight)
        pair = (x, layout.forward(weight))
        if axis.sequence_parallel:
            return axis.collectives.of_scatter([pair], [layout], False).matmul_scatter([pair]).wait()
        return all_reduce(sum_of_products([pair]), axis.group).wait()

    @staticmethod
    def backward(ctx: _RowContext, *dys: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        axis = ctx.axis
        layout = ctx.layout
        dy = dys[0].contiguous()
        matrix = layout.input_gradient(weight)
        if axis.sequence_parallel:
            gathered = ctx.needs_input_grad[3]
            collectives = axis.collectives.of_gather(dy, [matrix], [layout], gathered)
            dy, (dx,) = collectives.gather_matmul(dy, [matrix], gathered)
        else:
            dx = torch.matmul(dy, matrix)
        wanted = ctx.needs_input_grad[3]
        return dx, None, None, taken(ctx.sink, layout.weight_gradient(weight, x, dy)) if wanted else None


_row = applied(_Row, _Row.forward)


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b on one rank, whose weight has a gradient sink or a kind of product."""

    @staticmethod
    def forward(
        ctx: _LinearContext, x: torch.Tensor, layout: WeightLayout, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.layout, ctx.sink = layout, gradient_sink(weight)
        ctx.save_for_backward(x, weight, bias)
        y = functional.linear(x, layout.forward(weight).t(), layout.used(bias))
        # Autograd refuses in-place changes, as by nn.ReLU(inplace=True), of a view that a Function returns.
        not_a_view: torch.Tensor = torch.ops.aten._unsafe_view(y, y.shape)
        return not_a_view

    @staticmethod
    def backward(ctx: _LinearContext, *dys: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        layout = ctx.layout
        dy = dys[0]
        wanted = ctx.needs_input_grad
        dx = torch.matmul(dy, layout.input_gradient(weight)) if wanted[0] else None
        gradient = taken(ctx.sink, layout.weight_gradient(weight, x, dy)) if wanted[2] else None
        return dx, None, gradient, layout.bias_gradient(bias, dy) if wanted[3] else None


_linear = applied(_Linear, _Linear.forward)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layout: WeightLayout) -> torch.Tensor:
    """y = x Wᵀ + b, [..., K] to [..., N], without a collective; W is what ``layout`` uses of ``weight``."""
    plain = type(x) in (torch.Tensor, nn.Parameter)  # A subclass of Tensor has a product of its own.
    no_sink = not plain or torch.compiler.is_compiling() or gradient_sink(weight) is None or not weight.requires_grad
    if layout.product is None and no_sink:
        return functional.linear(x, layout.matrix(weight).t(), layout.used(bias))
    return _linear(_autocast(x), layout, _autocast(weight), None if bias is None else _autocast(bias))


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in autocast's dtype of multiplications, with its gradient sink, which takes the uncast product.

    Autocast does not see the operands of our autograd functions.
    """
    device = tensor.device.type
    if not torch.is_autocast_enabled(device):
        return tensor
    cast = tensor.to(torch.get_autocast_dtype(device))
    if sink := gradient_sink(tensor):
        GRADIENT_SINK.set(cast, sink)
    return cast


class ColumnLinear(ShowsWhole):
    """A column-parallel linear layer: this rank has a shard of its outputs.

    With ``inside``, a plain tensor of hidden states is in the region already; without, it enters the region here.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, axis: TensorAxis, layout: WeightLayout, inside: bool
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.axis, self.layout, self.inside = axis, layout, inside
        self.projections = Projections([self])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, K], or its shard [B, s, K], to [B, S, N]."""
        if isinstance(x, RegionInput):
            return self.projections.output(self, x)
        if self.inside:
            return linear(x, self.weight, self.bias, self.layout)
        return column_outputs([self], x)[0]

    def extra_repr(self) -> str:
        inputs, outputs = self.layout.matrix(self.weight).shape
        return f"{inputs} -> {outputs} on tensor rank {self.axis.rank} of {self.axis.size}"


def column_outputs(layers: Sequence[ColumnLinear], x: torch.Tensor, stacked: bool = False) -> tuple[torch.Tensor, ...]:
    """The output [B, S, N_i] of each of ``layers`` for ``x`` from outside of the region; ``stacked``: [n, B, S, N]."""
    parameters = (None if each is None else _autocast(each) for layer in layers for each in (layer.weight, layer.bias))
    layouts = [layer.layout for layer in layers]
    return _columns(_autocast(x).contiguous(), layers[0].axis, layouts, stacked, *parameters)


class Projections:
    """Column linears that a module calls one after another with the same hidden states (query, key and value).

    The first call computes the outputs of all of them, so that hidden states enter the region once. The RegionInput
    keeps the other outputs until their layers are called.
    """

    def __init__(self, layers: Sequence[ColumnLinear]) -> None:
        self.layers = list(layers)

    def output(self, layer: ColumnLinear, x: RegionInput) -> torch.Tensor:
        if layer not in x.projected:
            outputs = column_outputs(self.layers, x.source)
            x.projected.update(zip(self.layers, map(x.unpad, outputs), strict=True))
        return x.projected.pop(layer)

    def stacked(self, x: RegionInput) -> torch.Tensor:
        """The outputs of all layers in one tensor, [n, B, S, N]."""
        (outputs,) = column_outputs(self.layers, x.source, stacked=True)
        # Shared experts may be given tokens [T, H], which have no sequence to be padded.
        return outputs if x.dim() < 3 else outputs.narrow(1 + SEQUENCE_DIM, 0, x.shape[SEQUENCE_DIM])


def stacked_outputs(layers: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """The outputs of ``layers``, which have one size, in one tensor [n, B, S, N].

    Column linears of one ``Projections`` write into it, without calls of their forwards; other outputs are copied.
    """
    first = layers[0]
    if isinstance(x, RegionInput) and isinstance(first, ColumnLinear):
        projections = first.projections
        if [id(each) for each in projections.layers] == [id(each) for each in layers]:
            return projections.stacked(x)
    return torch.stack([layer(x) for layer in layers])


def group_projections(layers: Sequence[ColumnLinear]) -> None:
    """Compute the outputs of all of ``layers`` at the first call: hidden states enter the region once for all."""
    projections = Projections(layers)
    for layer in layers:
        layer.projections = projections


class RowLinear(ShowsWhole):
    """A row-parallel linear layer: this rank has a shard of its inputs; the sum over the ranks leaves the region.

    The caller may modify the output in place (add a residual to it).
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, axis: TensorAxis, layout: WeightLayout) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.axis, self.layout = axis, layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, K] to [B, S, N], or to its shard [B, ceil(S / tp), N]."""
        if self.axis.sequence_parallel:
            x = padded(x, self.axis.size)
        y = _row(_autocast(x).contiguous(), self.axis, self.layout, _autocast(self.weight))
        return y if self.bias is None else y + _autocast(self.bias)

    def extra_repr(self) -> str:
        inputs, outputs = self.layout.matrix(self.weight).shape
        return f"{inputs} on tensor rank {self.axis.rank} of {self.axis.size} -> {outputs}"


class ColumnParallelLinear(ColumnLinear):
    """``nn.Linear`` sharded along its outputs, for models that are written with tensor parallelism.

    Takes hidden states that are the same on every tensor rank, [B, S, in_features] (with ``sequence_parallel``, this
    rank's shard of the sequence), and returns this rank's [B, S, out_features / tp]. Its parameters are shards of those
    that nn.Linear draws from the same seed. Raises ValueError where there are fewer outputs than ranks.
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
        sharding = shard_sections(0, [out_features], axis.size)
        weight, offset = _initial(in_features, out_features, bias, factory)
        keep_shard(weight, sharding, axis.rank)
        if offset is not None:
            keep_shard(offset, sharding, axis.rank)
        super().__init__(weight, offset, axis, WeightLayout(), inside=False)


class RowParallelLinear(RowLinear):
    """``nn.Linear`` sharded along its inputs: the layer after a ColumnParallelLinear.

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
        sharding = shard_sections(1, [in_features], axis.size)
        weight, offset = _initial(in_features, out_features, bias, factory)
        keep_shard(weight, sharding, axis.rank)
        if offset is not None and axis.sequence_parallel:
            sum_gradient(offset, axis.group)
        super().__init__(weight, offset, axis, WeightLayout())


def _initial(
    in_features: int, out_features: int, bias: bool, factory: dict[str, Any]
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """The whole weight and bias that nn.Linear draws; seeded alike, every rank draws the same."""
    whole = nn.Linear(in_features, out_features, bias, **factory)
    return whole.get_parameter("weight"), whole.get_parameter("bias") if bias else None
