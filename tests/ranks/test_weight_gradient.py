"""Linear layers that add their weight's gradient to a buffer, by autograd's rules: every other use stays right."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import nn
from transformers.pytorch_utils import Conv1D

from ds_npu.parallel.runtime.forward_wraps import Level, replace_innermost_forward, wrap_forward
from ds_npu.parallel.tensor import weight_gradient
from ds_npu.parallel.tensor.direct_layers import is_plain, use_direct_gradient
from ds_npu.parallel.tensor.linear import ColumnLinear, ColumnParallelLinear, RowParallelLinear
from ds_npu.parallel.tensor.product import WeightLayout
from ds_npu.parallel.tensor.weight_gradient import GradientQueue, GradientSink, gradient_sink, sum_gradient
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

K, N = 5, 3


def direct(kind: str = "linear") -> tuple[nn.Module, torch.Tensor]:
    """A float64 layer [K] -> [N], and the buffer its gradient is added to, which holds ones."""
    torch.manual_seed(1)
    layer = (nn.Linear(K, N) if kind == "linear" else Conv1D(N, K)).to(torch.float64)
    use_direct_gradient(layer)
    buffer = torch.ones_like(layer.weight)
    GradientSink(layer.weight, lambda dtype: buffer)
    return layer, buffer


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()


def true_gradients(kind: str, x: torch.Tensor, uses: int) -> list[torch.Tensor]:
    """Of x, weight and bias by plain PyTorch's matrix product; ``uses`` says how often the layer is used for x."""
    layer, _ = direct(kind)
    matrix = layer.weight if kind == "conv1d" else layer.weight.t()
    total = sum(((index + 1) * (x @ matrix + layer.bias)).square().sum() for index in range(uses))
    return list(torch.autograd.grad(total, (x, layer.weight, layer.bias)))


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("shape", [(K,), (4, K), (2, 4, K)], ids=str)
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_the_buffer_gets_what_the_weight_would(kind, shape, uses):
    layer, buffer = direct(kind)
    x = inputs(*shape)
    sum(((index + 1) * layer(x)).square().sum() for index in range(uses)).backward()
    dx, dw, db = true_gradients(kind, x.detach().requires_grad_(), uses)
    torch.testing.assert_close(buffer, 1 + dw, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, dx, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.bias.grad, db, rtol=1e-12, atol=1e-12)
    assert layer.weight.grad is None


def test_autograd_grad_hands_the_gradient_out():
    layer, buffer = direct()
    x = inputs(4, K)
    found = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight))
    for mine, true in zip(found, true_gradients("linear", inputs(4, K), 1), strict=False):
        torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)
    assert torch.equal(buffer, torch.ones_like(buffer))


def test_nothing_is_added_where_only_other_gradients_are_wanted():
    layer, buffer = direct()
    x = inputs(4, K)
    torch.autograd.grad(layer(x).square().sum(), x)
    layer(x).square().sum().backward(inputs=[x, layer.bias])
    assert torch.equal(buffer, torch.ones_like(buffer)) and layer.weight.grad is None
    layer(x).square().sum().backward(inputs=[layer.weight])
    torch.testing.assert_close(buffer, 1 + true_gradients("linear", inputs(4, K), 1)[1], rtol=1e-12, atol=1e-12)


def test_gradients_of_gradients():
    layer, buffer = direct()
    x = inputs(4, K)
    layer(x).square().sum().backward(create_graph=True)
    (found,) = torch.autograd.grad(layer.weight.grad.square().sum(), x)
    layer, _ = direct()
    x = inputs(4, K)
    (gradient,) = torch.autograd.grad(
        (x @ layer.weight.t() + layer.bias).square().sum(), layer.weight, create_graph=True
    )
    (expected,) = torch.autograd.grad(gradient.square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(buffer, torch.ones_like(buffer))


def test_a_hook_that_changes_the_gradient_is_given_it():
    layer, buffer = direct()
    layer.weight.register_hook(lambda gradient: 2 * gradient)
    layer(inputs(4, K)).square().sum().backward()
    expected = 2 * true_gradients("linear", inputs(4, K), 1)[1]
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(buffer, torch.ones_like(buffer))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pytorch_runs_them", [True, False])
def test_hooks_run_once_in_a_backward_after_every_use(monkeypatch, pytorch_runs_them, tied):
    """Tied: one use of the weight goes the ordinary way. PyTorch 2.13 runs hooks by itself, and so once more here."""
    assert weight_gradient.hooks_run_after_none()
    monkeypatch.setattr(weight_gradient, "hooks_run_after_none", lambda: pytorch_runs_them)
    layer, buffer = direct()
    seen: list[torch.Tensor] = []
    ordinary = tied * inputs(K, N).detach().t()
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(buffer.clone()))
    expected = true_gradients("linear", inputs(4, K), 2)[1]
    for index in (1, 2):
        x = inputs(4, K)
        loss = layer(x).square().sum() + (2 * layer(x)).square().sum()
        (loss + (layer.weight * ordinary).sum() if tied else loss).backward()
        runs = index * (1 if pytorch_runs_them or tied else 2)
        assert len(seen) == runs
        torch.testing.assert_close(seen[-1], 1 + index * expected, rtol=1e-12, atol=1e-12)
        if tied:
            torch.testing.assert_close(layer.weight.grad, index * ordinary)


def saved_and_read(value: object) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved_and_read])
@pytest.mark.parametrize(("kind", "plain"), [("linear", nn.Linear), ("conv1d", Conv1D)])
def test_a_copy_and_a_file_have_layers_of_their_own(duplicate, kind, plain):
    layer, buffer = direct(kind)
    other, read = duplicate(layer), saved_and_read(layer.weight)
    assert type(other) is plain and isinstance(layer, plain)
    assert torch.equal(other.weight, layer.weight) and torch.equal(other.bias, layer.bias)
    with torch.no_grad():
        other.weight.zero_()
    assert torch.equal(other(inputs(4, K)), other.bias.expand(4, N))
    assert torch.equal(read, layer.weight) and not torch.equal(layer.weight, other.weight)
    assert gradient_sink(other.weight) is None and gradient_sink(read) is None
    other(inputs(4, K)).square().sum().backward()
    assert other.weight.grad is not None and torch.equal(buffer, torch.ones_like(buffer))


@pytest.mark.parametrize("pytorch_runs_them", [True, False])
def test_a_weight_is_freed(monkeypatch, pytorch_runs_them):
    monkeypatch.setattr(weight_gradient, "hooks_run_after_none", lambda: pytorch_runs_them)
    layer, _ = direct()
    layer(inputs(4, K)).sum().backward()
    weight = weakref.ref(layer.weight)
    del layer
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_adds_to_a_float32_buffer_without_rounding(dtype):
    torch.manual_seed(1)
    layer = nn.Linear(K, N)
    use_direct_gradient(layer)
    buffer = torch.zeros(N, K)
    asked: list[torch.dtype] = []
    GradientSink(layer.weight, lambda low: asked.append(low) or buffer)
    x, dy = torch.randn(64, K), torch.randn(64, N).to(dtype)
    with torch.autocast("cpu", dtype):
        y = layer(x)
        expected = nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(y, expected) and y.dtype == dtype
    y.backward(dy)
    assert asked == [dtype] and layer.weight.grad is None and layer.bias.grad.dtype == torch.float32
    true = dy.double().t() @ x.to(dtype).double()
    assert (buffer - true).norm() / true.norm() < 1e-6


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_outputs_that_are_changed_in_place(kind):
    layer, buffer = direct(kind)
    x = inputs(2, 4, K)
    layer(x).relu_().sum().backward()
    plain, other = copy.deepcopy(layer), inputs(2, 4, K)
    plain(other).relu().sum().backward()
    torch.testing.assert_close((buffer - 1, x.grad), (plain.weight.grad, other.grad), rtol=1e-12, atol=1e-12)


def test_a_layer_with_a_wrapped_forward():
    layer, (x, calls) = nn.Linear(K, N).double(), (inputs(4, K), [])
    wrap_forward(layer, lambda forward, x: calls.append(layer) or forward(x), Level.RECOMPUTE)
    assert is_plain(layer)
    use_direct_gradient(layer)
    buffer = torch.zeros_like(layer.weight)
    GradientSink(layer.weight, lambda dtype: buffer)
    other = copy.deepcopy(layer)
    layer(x).sum().backward()
    assert len(calls) == 1 and layer.weight.grad is None
    assert torch.equal(buffer, torch.ones(N, 4).double() @ x.detach())
    with torch.no_grad():
        other.weight.zero_()
    assert type(other) is nn.Linear and torch.equal(other(x), other.bias.expand(4, N))
    replace_innermost_forward(layer, lambda x: x)
    layer.__class__ = nn.Linear
    assert not is_plain(layer)


def test_a_buffer_of_another_low_dtype_is_left_alone():
    layer = nn.Linear(K, N)
    use_direct_gradient(layer)
    buffer = torch.zeros(N, K, dtype=torch.bfloat16)
    GradientSink(layer.weight, lambda dtype: buffer)
    layer(torch.randn(4, K)).sum().backward()
    assert layer.weight.grad is not None and not buffer.any()


class Parallel(nn.Module):
    """Column, row, and inside the region a column linear whose weight is whole on every rank."""

    def __init__(self, topology: Topology, sequence_parallel: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        options = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
        self.column = ColumnParallelLinear(6, 8, topology, **options)
        self.row = RowParallelLinear(8, 6, topology, **options)
        whole = nn.Linear(4, 4, dtype=torch.float64)
        sum_gradient(whole.weight, self.column.axis.group)
        sum_gradient(whole.bias, self.column.axis.group)
        self.inside = ColumnLinear(whole.weight, whole.bias, self.column.axis, WeightLayout(), inside=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.row(torch.tanh(self.inside(torch.tanh(self.column(x)))))


def backwards(model: Parallel, sequence_parallel: bool, count: int) -> Iterator[nn.ModuleDict]:
    """``count`` backwards of ``model``; behind each the layers of one process, which has the gradients up to there."""
    rank = dist.get_rank()
    torch.manual_seed(4)
    sizes = {"column": (6, 8), "row": (8, 6), "inside": (4, 4)}
    plain = nn.ModuleDict({name: nn.Linear(*size, dtype=torch.float64) for name, size in sizes.items()})
    for index in range(count):
        generator = torch.Generator().manual_seed(5 + index)
        x, dy = (torch.randn(2, 4, 6, dtype=torch.float64, generator=generator) for _ in range(2))
        mine = slice(2 * rank, 2 * rank + 2) if sequence_parallel else slice(None)
        model(x[:, mine]).backward(dy[:, mine])
        parts = torch.tanh(plain["column"](x)).split(4, dim=-1)
        plain["row"](torch.tanh(torch.cat([plain["inside"](part) for part in parts], dim=-1))).backward(dy)
        yield plain


def hold_shards(found: dict[str, torch.Tensor], plain: nn.ModuleDict) -> None:
    """The gradients of this rank's weights are those of one process."""
    half = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    torch.testing.assert_close(found["column"], plain["column"].weight.grad[half], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["row"], plain["row"].weight.grad[:, half], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["inside"], plain["inside"].weight.grad, rtol=1e-12, atol=1e-12)


def adds_shards(sequence_parallel: bool) -> None:
    model = Parallel(Topology(Degrees(tp=2)), sequence_parallel)
    layers = {"column": model.column, "row": model.row, "inside": model.inside}
    buffers = {name: torch.zeros_like(layer.weight) for name, layer in layers.items()}
    for name, buffer in buffers.items():
        GradientSink(layers[name].weight, lambda dtype, buffer=buffer: buffer)
    *_, plain = backwards(model, sequence_parallel, 2)
    # This one is summed over tensor ranks by a hook, which is given it.
    assert not buffers["inside"].any()
    hold_shards(buffers | {"inside": model.inside.weight.grad}, plain)
    assert model.column.weight.grad is None and model.row.weight.grad is None
    dist.barrier()


def queues_shards(sequence_parallel: bool) -> None:
    model = Parallel(Topology(Degrees(tp=2)), sequence_parallel)
    layers = {"column": model.column, "row": model.row, "inside": model.inside}
    queue = GradientQueue()
    queue.is_open = True
    for name, layer in layers.items():
        weight = layer.weight
        sink = GradientSink(weight, lambda dtype, weight=weight: weight.grad, direct=False)
        sink.name, sink.queue = name, queue
    later = []
    for plain in backwards(model, sequence_parallel, 3):  # noqa: B007
        later.append(queue.collect())
        assert later[-1].names == ["row", "inside", "column"]
        if len(later) > 1:
            later.pop(0).compute()
        else:
            assert not any(layer.weight.grad is not None for layer in layers.values())
    later.pop().compute()
    assert queue.close() == []
    hold_shards({name: layer.weight.grad for name, layer in layers.items()}, plain)
    dist.barrier()


def adds_and_queues_shards() -> None:
    for sequence_parallel in (False, True):
        adds_shards(sequence_parallel)
        queues_shards(sequence_parallel)


def test_tensor_parallel_layers_add_and_queue_their_shards():
    run_on_ranks(2, adds_and_queues_shards)
