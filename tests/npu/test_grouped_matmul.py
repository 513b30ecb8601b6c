"""Grouped matrix products against a product for each group in float64."""

import subprocess
import sys
from itertools import accumulate

import pytest
import torch
import torch_npu
from agreement import FLOATING, agree, layouts, numbers, on_npu
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = st.sampled_from(FLOATING)
GROUPS = st.lists(st.integers(0, 6), min_size=2, max_size=5).filter(any)
DIM = st.sampled_from((1, 3, 16, 40))


def roundings(dtype: torch.dtype, terms: int) -> float:
    """A sum of ``terms`` products is in float32: there it is most of the error, else the result's one rounding is."""
    return 4 + terms if dtype == torch.float32 else 1.1


def group_list(sizes: list[int], kind: int) -> torch.Tensor:
    """``sizes`` as cumulative sums (0), as they are (1), or with the index of each group (2)."""
    if kind == 2:
        return torch.tensor(list(enumerate(sizes)))
    return torch.tensor(list(accumulate(sizes)) if kind == 0 else sizes)


def bias_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype


def products(
    x: list[torch.Tensor], weight: list[torch.Tensor], bias: list[torch.Tensor] | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The result for each group, and the sum of its terms' absolute values."""
    zero = torch.zeros((), dtype=torch.float64)
    biases = [zero] * len(x) if bias is None else bias
    return (
        [a @ b + c for a, b, c in zip(x, weight, biases, strict=True)],
        [a.abs() @ b.abs() + c.abs() for a, b, c in zip(x, weight, biases, strict=True)],
    )


@settings(max_examples=50)
@given(GROUPS, DIM, DIM, DTYPES, st.booleans(), st.data())
def test_one_x_and_one_weight_are_multiplied_group_by_group(sizes, inner, columns, dtype, biased, data):
    kind, split_item = data.draw(st.sampled_from((0, 1, 2))), data.draw(st.sampled_from((2, 3)))
    x = numbers(sum(sizes), inner, seed=1, dtype=dtype)
    weight = numbers(len(sizes), inner, columns, seed=2, dtype=dtype)
    bias = numbers(len(sizes), columns, seed=3, dtype=dtype) if biased else None
    (y,) = torch_npu.npu_grouped_matmul(
        [on_npu(x, dtype, data.draw(layouts(2)))],
        [on_npu(weight, dtype, data.draw(layouts(3)))],
        bias=[on_npu(bias, bias_dtype(dtype))] if biased else None,
        group_list=group_list(sizes, kind).npu(),
        split_item=split_item,
        group_type=0,
        group_list_type=kind,
    )
    expected, magnitude = products(x.split(sizes), weight.unbind(), None if bias is None else bias.unbind())
    agree(y, torch.cat(expected), torch.cat(magnitude), roundings(dtype, inner))


@settings(max_examples=40)
@given(GROUPS, DIM, DIM, DTYPES, st.sampled_from((0, 1)), st.data())
def test_lists_of_weights_and_of_x_go_to_one_y(sizes, inner, columns, dtype, kind, data):
    many_x, biased, transposed = (data.draw(st.booleans()) for _ in range(3))
    x = numbers(sum(sizes), inner, seed=1, dtype=dtype)
    weight = numbers(len(sizes), columns, inner, seed=2, dtype=dtype).transpose(1, 2)
    bias = numbers(len(sizes), columns, seed=3, dtype=dtype) if biased else None
    on = [on_npu(w.t(), dtype).t() if transposed else on_npu(w.contiguous(), dtype) for w in weight]
    assert all(w.is_contiguous() != transposed or 1 in w.shape for w in on)
    (y,) = torch_npu.npu_grouped_matmul(
        [on_npu(part, dtype) for part in x.split(sizes)] if many_x else [on_npu(x, dtype)],
        on,
        bias=[on_npu(b, bias_dtype(dtype)) for b in bias] if biased else None,
        group_list=group_list(sizes, kind).npu(),
        split_item=3,
        group_type=0,
        group_list_type=kind,
    )
    expected, magnitude = products(x.split(sizes), weight.unbind(), None if bias is None else bias.unbind())
    agree(y, torch.cat(expected), torch.cat(magnitude), roundings(dtype, inner))


@settings(max_examples=40)
@given(st.lists(st.tuples(DIM, DIM, DIM), min_size=1, max_size=3), st.integers(0, 2), DTYPES, st.booleans(), st.data())
def test_not_split_means_each_x_with_its_own_weight(shapes, extra_dims, dtype, biased, data):
    x = [numbers(*(2,) * extra_dims, m, k, seed=m, dtype=dtype) for m, k, _ in shapes]
    weight = [numbers(k, n, seed=n, dtype=dtype) for _, k, n in shapes]
    bias = [numbers(n, seed=n, dtype=dtype) for _, _, n in shapes] if biased else None
    found = torch_npu.npu_grouped_matmul(
        [on_npu(value, dtype, data.draw(layouts(value.dim()))) for value in x],
        [on_npu(value, dtype, data.draw(layouts(2))) for value in weight],
        bias=[on_npu(value, bias_dtype(dtype)) for value in bias] if biased else None,
        group_list=torch.zeros(0, dtype=torch.int64).npu(),
        split_item=0,
        group_type=-1,
    )
    expected, magnitude = products(x, weight, bias)
    for y, value, size, (_, k, _) in zip(found, expected, magnitude, shapes, strict=True):
        agree(y, value, size, roundings(dtype, k))


@settings(max_examples=40)
@given(GROUPS, DIM, DIM, DTYPES, st.sampled_from((0, 1)), st.data())
def test_groups_of_the_inner_dim_give_one_product_each_and_zeros_for_none(sizes, rows, columns, dtype, kind, data):
    x = numbers(sum(sizes), rows, seed=1, dtype=dtype)
    weight = numbers(sum(sizes), columns, seed=2, dtype=dtype)
    (y,) = torch_npu.npu_grouped_matmul(
        [on_npu(x, dtype, data.draw(layouts(2))).t()],
        [on_npu(weight, dtype, data.draw(layouts(2)))],
        group_list=group_list(sizes, kind).npu(),
        split_item=3,
        group_type=2,
        group_list_type=kind,
    )
    expected, magnitude = products([part.t() for part in x.split(sizes)], list(weight.split(sizes)), None)
    agree(y, torch.stack(expected), torch.stack(magnitude), roundings(dtype, max(sizes)))


@settings(max_examples=20)
@given(GROUPS, DIM, DIM, DTYPES, st.sampled_from((0, 3)))
def test_a_list_of_numbers_on_the_host_splits_x(sizes, inner, columns, dtype, split_item):
    x = numbers(sum(sizes), inner, seed=1, dtype=dtype)
    weight = numbers(len(sizes), inner, columns, seed=2, dtype=dtype)
    found = torch_npu.npu_grouped_matmul(
        [on_npu(x, dtype)],
        [on_npu(w, dtype) for w in weight],
        group_list=list(accumulate(sizes)),
        split_item=split_item,
        group_type=None,
    )
    expected, magnitude = products(x.split(sizes), weight.unbind(), None)
    assert len(found) == (len(sizes) if split_item == 0 else 1)
    for y, value, size in zip(
        found,
        expected if split_item == 0 else [torch.cat(expected)],
        magnitude if split_item == 0 else [torch.cat(magnitude)],
        strict=True,
    ):
        agree(y, value, size, roundings(dtype, inner))


@settings(max_examples=30)
@given(GROUPS, DIM, DIM, st.sampled_from((torch.bfloat16, torch.float16)), st.booleans(), st.data())
def test_the_gradient_of_the_weights_is_added_into_float32(sizes, rows, columns, dtype, flat, data):
    x = numbers(sum(sizes), rows, seed=1, dtype=dtype)
    weight = numbers(sum(sizes), columns, seed=2, dtype=dtype)
    before = numbers(len(sizes), rows, columns, seed=3, dtype=torch.float32)
    shape = (len(sizes) * rows, columns) if flat else before.shape
    y = on_npu(before.reshape(shape), torch.float32)
    result = torch_npu.npu_grouped_matmul_add_(
        y,
        on_npu(x, dtype, data.draw(layouts(2))),
        on_npu(weight, dtype, data.draw(layouts(2))),
        torch.tensor(list(accumulate(sizes))).npu(),
        transpose_x=True,
        transpose_weight=False,
        group_type=2,
    )
    assert result.data_ptr() == y.data_ptr()
    expected, magnitude = products([part.t() for part in x.split(sizes)], list(weight.split(sizes)), list(before))
    agree(y, torch.stack(expected).reshape(shape), torch.stack(magnitude).reshape(shape), 4 + max(sizes))


@settings(max_examples=20)
@given(st.integers(1, 20), DIM, DIM, st.sampled_from((torch.bfloat16, torch.float16)), st.integers(0, 7))
def test_one_group_adds_the_gradient_of_a_matrix_into_a_flat_float32_buffer(tokens, inputs, outputs, dtype, offset):
    """What a linear layer that accumulates gradients needs: main_grad += grad^T @ x in a view of a flat buffer."""
    grad = numbers(tokens, outputs, seed=1, dtype=dtype)
    x = numbers(tokens, inputs, seed=2, dtype=dtype)
    buffer = on_npu(torch.ones(offset + outputs * inputs + 3), torch.float32)
    main_grad = buffer[offset : offset + outputs * inputs].view(outputs, inputs)
    torch_npu.npu_grouped_matmul_add_(main_grad, on_npu(grad, dtype), on_npu(x, dtype), torch.tensor([tokens]).npu())
    agree(main_grad, 1 + grad.t() @ x, 1 + grad.abs().t() @ x.abs(), 4 + tokens)
    assert buffer[:offset].cpu().eq(1).all()
    assert buffer[-3:].cpu().eq(1).all()


def test_an_expert_layer_trains_with_three_grouped_products():
    """Forward, gradient of x (weights transposed as views) and gradient of the weights, as MindSpeed calls them."""
    sizes, dtype = [5, 0, 3], torch.bfloat16
    x = numbers(8, 16, seed=1, dtype=dtype).requires_grad_()
    weight = numbers(3, 16, 4, seed=2, dtype=dtype).requires_grad_()
    grad = numbers(8, 4, seed=3, dtype=dtype)
    torch.cat([part @ w for part, w in zip(x.split(sizes), weight, strict=True)]).backward(grad)
    counts = torch.tensor(sizes).npu()
    on_x, on_weight, on_grad = (on_npu(value.detach(), dtype) for value in (x, weight, grad))
    options = {"group_list": counts, "group_list_type": 1, "split_item": 3}
    (dx,) = torch_npu.npu_grouped_matmul([on_grad], [on_weight.transpose(1, 2)], group_type=0, **options)
    (dweight,) = torch_npu.npu_grouped_matmul([on_x.t()], [on_grad], group_type=2, **options)
    with torch.no_grad():
        parts = zip(grad.split(sizes), weight, strict=True)
        agree(dx, x.grad, torch.cat([g.abs() @ w.abs().t() for g, w in parts]), 1.1)
        pairs = zip(x.split(sizes), grad.split(sizes), strict=True)
        agree(dweight, weight.grad, torch.stack([a.abs().t() @ g.abs() for a, g in pairs]), 1.1)


REFUSED = ("per_token_scale=[torch.ones(3).npu()]", "act_type=1")


@pytest.mark.parametrize("argument", REFUSED)
def test_quantization_and_activation_are_refused_by_name(argument):
    """In its own process: an error stops the simulated device."""
    code = (
        "import torch, torch_npu; x, weight = torch.ones(3, 4).npu(), torch.ones(2, 4, 4).npu();"
        "counts = torch.tensor([1, 2]).npu();"
        "torch_npu.npu_grouped_matmul([x], [weight], group_list=counts, group_list_type=1, split_item=3, group_type=0, "
        f"{argument}); torch.npu.synchronize()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert f"grouped matmul: {argument.split('=')[0]}" in run.stderr
    assert "not simulated" in run.stderr
