"""Whole numbers, and which type a result has: as torch on the CPU, to the bit."""

import pytest
import torch
from agreement import agree, layouts, numbers, on_npu, within
from hypothesis import given
from hypothesis import strategies as st

SHAPES = st.lists(st.integers(0, 5), max_size=4)
INTEGERS = (torch.int64, torch.int32)


WHOLE = {
    "add": lambda a, b: torch.add(a, b, alpha=3),
    "sub": lambda a, b: torch.sub(a, b, alpha=3),
    "rsub": lambda a, b: torch.rsub(a, b, alpha=3),
    "mul": torch.mul,
    "pow": lambda a, b: a ** b.abs(),
    "square": lambda a, b: a**2,
    "power of two": lambda a, b: 2 ** b.abs(),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": lambda a, b: torch.clamp(a, b, b + 2),
    "clamp below": lambda a, b: torch.clamp(a, min=b),
    "clamp above": lambda a, b: torch.clamp(a, max=b),
    "abs": lambda a, b: abs(a),
    "neg": lambda a, b: -a,
    "sign": lambda a, b: torch.sign(a),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=2),
}


@pytest.mark.parametrize("name", WHOLE)
@given(st.data())
def test_arithmetic_of_whole_numbers_is_exact(name, data):
    dtype, shape = data.draw(st.sampled_from(INTEGERS)), data.draw(SHAPES)
    a, b = (within(-9, 9, *shape, seed=seed, dtype=torch.bfloat16).round() for seed in (1, 2))
    on_a, on_b = (on_npu(value, dtype, data.draw(layouts(len(shape)))) for value in (a, b))
    found = WHOLE[name](on_a, on_b)
    assert found.dtype == dtype
    assert torch.equal(found.cpu().double(), WHOLE[name](a, b))


def test_large_whole_numbers_keep_all_their_bits():
    value = torch.tensor([2**62 + 1, -(2**62) - 1, 2**53 + 1])
    assert torch.equal((value.npu() + 1).cpu(), value + 1)
    assert torch.equal((value.npu() * torch.tensor(1).npu()).cpu(), value)
    assert torch.equal(value.npu().clamp(max=2**62).cpu(), value.clamp(max=2**62))


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


@pytest.mark.parametrize("name", ["add", "mul", "maximum", "minimum", "div", "eq", "lt", "logical_and"])
@pytest.mark.parametrize("left", DTYPES, ids=str)
@pytest.mark.parametrize("right", DTYPES, ids=str)
def test_the_result_has_the_type_torch_promotes_to(name, left, right):
    a, b = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.ones(2)  # the same in every type
    for other in (b, b[0]):
        expected = getattr(torch, name)(a.to(left), other.to(right))
        found = getattr(torch, name)(a.to(left).npu(), other.to(right).npu())
        assert found.dtype == expected.dtype
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scalar", [True, 2, 2.0], ids=repr)
def test_a_scalar_changes_the_type_as_in_torch(dtype, scalar):
    value = torch.tensor([1.0, 0.0, 1.0]).to(dtype)
    for function in (torch.add, torch.mul, torch.div):
        expected, found = function(value, scalar), function(value.npu(), scalar)
        assert found.dtype == expected.dtype
        assert torch.equal(found.cpu(), expected)
    cpu_scalar = torch.tensor(scalar)
    assert torch.equal((value.npu() * cpu_scalar).cpu(), value * cpu_scalar)
    assert torch.equal((cpu_scalar + value.npu()).cpu(), cpu_scalar + value)


def test_complex_numbers_of_their_parts():
    first, second = numbers(3, 1, 8, seed=1, dtype=torch.float32), numbers(1, 5, 8, seed=2, dtype=torch.float32)
    left, right = first.float().npu(), second.float().npu()
    pairs = [
        (torch.polar(left, right), torch.polar(*torch.broadcast_tensors(first, second))),
        (torch.complex(left, right), torch.complex(*torch.broadcast_tensors(first, second))),
    ]
    for found, expected in pairs:
        assert found.dtype == torch.complex64
        agree(torch.view_as_real(found), torch.view_as_real(expected), roundings=4)
