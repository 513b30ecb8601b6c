"""What operators cost, against what their references do: FLOP as torch counts them, and the bytes of the tensors that
they are given, return and change."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from operator_cases import CASES, Case
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ds_npu.acceptance.expert_cases import SMALL_EXPERTS
from ds_npu.acceptance.operator_call import Call
from ds_npu.operator_costs import Cost, Shape
from ds_npu.ops.adamw import adamw_
from ds_npu.ops.all import OPERATORS
from ds_npu.ops.attention import Inputs, Mask, Options, attention_backward, attention_forward
from ds_npu.ops.attention.reference import forward
from ds_npu.ops.grouped_matmul import grouped_outer, grouped_outer_accumulate_
from ds_npu.ops.matmul_accumulate import matmul_accumulate_

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
ATTENTIONS = (attention_forward, attention_backward)


def leaves(tree):
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, torch.Tensor)]


def counted(operator, args):
    """The cost of ``operator.reference(*args)``: each tensor is read once, what is returned or changed written once."""
    given = leaves(args)
    versions = [each._version for each in given]
    with FlopCounterMode(display=False) as counter:
        returned = leaves(operator.reference(*args))
    changed = [each for each, version in zip(given, versions, strict=True) if each._version != version]
    written = {id(each): each.nbytes for each in (*returned, *changed)}
    return Cost(counter.get_total_flops(), sum(each.nbytes for each in given), sum(written.values()))


def shape(x):
    return Shape(tuple(x.shape), x.itemsize)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_elementwise_operator_reads_and_writes_each_tensor_once(case: Case, dtype):
    args = case.args(dtype)
    found = counted(case.operator, args)
    assert case.operator.cost(*leaves(args)) == case.operator.cost(*map(shape, leaves(args))) == found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adamw_writes_all_but_the_gradients(dtype):
    args = adamw_.sample(dtype)
    assert adamw_.cost(*args[:4]) == counted(adamw_, args)
    assert adamw_.cost(*pytree.tree_map(shape, args[:4])) == adamw_.cost(*args[:4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_gradient_is_one_product_and_reads_and_writes_its_buffer(dtype):
    buffer, dy, x = matmul_accumulate_.sample(dtype)
    # torch counts no product in place.
    with FlopCounterMode(display=False) as counter:
        torch.addmm(buffer.to(dtype), dy.t(), x)
    found = dataclasses.replace(counted(matmul_accumulate_, (buffer, dy, x)), flop=counter.get_total_flops())
    assert matmul_accumulate_.cost(buffer, dy, x) == matmul_accumulate_.cost(*map(shape, (buffer, dy, x))) == found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("key_heads", "value_width"), [(4, 16), (2, 16), (1, 24), (4, 8)])
def test_attention_does_two_products_forward_and_five_backward(key_heads, value_width, dtype):
    widths = ((40, 4, 16), (56, key_heads, 16), (56, key_heads, value_width))
    q, k, v = (torch.randn(3, *each, dtype=dtype) for each in widths)
    # The mask, which hides nothing, keeps the reference from torch's flash attention, of which torch counts nothing.
    options, pairs = Options(mask=Mask(dense=torch.zeros(40, 56, dtype=torch.bool))), 3 * 40 * 56
    assert attention_forward.cost(q, k, v, pairs) == counted(attention_forward, (q, k, v, options))
    result = forward(q, k, v, options)
    found = counted(attention_backward, (torch.randn_like(result.out), Inputs(q, k, v), result, options))
    assert attention_backward.cost(*map(shape, (q, k, v)), pairs) == found


def test_a_mask_leaves_fewer_products_and_the_same_bytes():
    q = Shape((1, 64, 4, 16), 2)
    whole, causal = (attention_forward.cost(q, q, q, pairs) for pairs in (64 * 64, 64 * 65 / 2))
    assert causal.flop / whole.flop == 65 / 128
    assert (causal.read_bytes, causal.written_bytes) == (whole.read_bytes, whole.written_bytes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", SMALL_EXPERTS, ids=lambda call: call.name)
def test_operators_of_experts_read_and_write_each_tensor_once(call: Call, dtype):
    operator, args = call.function, call.args(dtype)
    found = counted(operator, args)
    if operator is grouped_outer_accumulate_:
        # torch counts no product in place.
        found = dataclasses.replace(found, flop=counted(grouped_outer, args[1:]).flop)
    assert operator.cost(*args) == operator.cost(*pytree.tree_map_only(torch.Tensor, shape, args)) == found


def test_every_operator_is_counted_here():
    by_itself = {matmul_accumulate_, adamw_, *ATTENTIONS, *(call.function for call in SMALL_EXPERTS)}
    assert {case.operator for case in CASES} | by_itself == set(OPERATORS)
