"""The operators of ds_npu.ops on NPU tensors: the kernel is what runs, and it computes what the formula says."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
import torch_npu
from agreement import FLOATING
from operator_cases import CASES, WITHOUT_KERNEL, Case, drawn, error, outcome
from torch.utils import _pytree as pytree

from ds_npu.ops.adamw import AdamStep, adamw_, reference
from ds_npu.ops.all import OPERATORS, report
from ds_npu.ops.layers import rms_norm, swiglu
from ds_npu.ops.matmul_accumulate import matmul_accumulate_

NPU = torch.device("npu")
dtypes = pytest.mark.parametrize("dtype", FLOATING, ids=str)


@pytest.fixture
def calls(monkeypatch):
    """How often each function of torch_npu that an operator needs is called."""
    counted: Counter[str] = Counter()

    def counting(name, function):
        def call(*args, **kwargs):
            counted[name] += 1
            return function(*args, **kwargs)

        return call

    for name in {name for operator in OPERATORS for name in operator.needs}:
        monkeypatch.setattr(torch_npu, name, counting(name, vars(torch_npu)[name]))
    return counted


def on_npu(args):
    return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().npu().requires_grad_(x.requires_grad), args)


def check_precision(case: Case, dtype: torch.dtype) -> None:
    """Forward and backward no further from float64 than twice what PyTorch's own computation in ``dtype`` is."""
    exact = outcome(case.formula, case.args(torch.float64))
    plain = outcome(case.plain, case.args(dtype))
    found = outcome(case.operator, on_npu(case.args(dtype)))
    for mine, own, true in zip(found, plain, exact, strict=True):
        assert mine.device.type == "npu"
        assert mine.dtype == own.dtype
        assert error(mine, true) <= 2 * error(own, true)


@dtypes
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernel_runs_once_and_is_right_forward_and_backward(case: Case, dtype, calls):
    check_precision(case, dtype)
    assert calls == dict.fromkeys(case.kernels, 1)


@dtypes
@pytest.mark.parametrize("case", WITHOUT_KERNEL[:-1], ids=lambda case: case.name)
def test_what_a_kernel_does_not_take_goes_to_the_reference(case: Case, dtype, calls):
    check_precision(case, dtype)
    assert not calls


def test_no_token_has_no_loss():
    case = WITHOUT_KERNEL[-1]
    losses, gradient = outcome(case.operator, on_npu(case.args(torch.bfloat16)))
    assert (losses.shape, gradient.shape) == ((0,), (0, 100))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_with_a_float32_weight_stays_one_kernel(dtype, calls):
    x, weight = drawn(4, 9, 64, seed=1, dtype=dtype), drawn(64, seed=2, dtype=torch.float32)
    true = outcome(rms_norm, [x.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), 1e-5])
    own = outcome(rms_norm.reference, [x, weight, 1e-5])
    for mine, plain, exact in zip(outcome(rms_norm, on_npu([x, weight, 1e-5])), own, true, strict=True):
        assert mine.dtype == plain.dtype
        assert error(mine, exact) <= 2 * error(plain, exact)
    assert calls == {"npu_rms_norm": 1}


@pytest.mark.parametrize("used", ["both", "norm", "sum"])
def test_sum_and_norm_may_be_used_each_alone(used):
    case = next(case for case in CASES if case.name == "sum and norm")
    pick = {"both": lambda y, total: y * 3 + total, "norm": lambda y, total: y * 1, "sum": lambda y, total: total * 1}

    def gradients(function, args):
        (pick[used](*function(*args))).sum().backward()
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in args[:3]]

    exact = gradients(case.formula, case.args(torch.float64))
    plain = gradients(case.plain, case.args(torch.float32))
    for mine, own, true in zip(gradients(case.operator, on_npu(case.args(torch.float32))), plain, exact, strict=True):
        assert error(mine, true) <= 2 * error(own, true)


@dtypes
def test_a_weight_gradient_goes_straight_into_the_buffer(dtype, calls):
    shapes = ((512, 256), (24, 512), (24, 256))
    buffer, dy, x = (drawn(*shape, seed=i, dtype=torch.float64, gradient=False) for i, shape in enumerate(shapes))
    expected, own = buffer + dy.t() @ x, buffer.float() + dy.float().t() @ x.float()
    mine = buffer.float().npu()
    low = [tensor.to(dtype).npu() for tensor in (dy, x)]
    torch.npu.synchronize()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    assert matmul_accumulate_(mine, *low) is mine
    assert torch.npu.max_memory_allocated() - before < mine.numel() * mine.element_size() / 8
    assert error(mine, expected) <= 2 * error(own, expected)
    assert calls["npu_grouped_matmul_add_"] == (dtype != torch.float32)


@dtypes
def test_adamw_takes_a_step_in_one_call(dtype, monkeypatch):
    sizes, step = (7, 130), AdamStep(lr=0.05, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=3)
    lists = [[drawn(n, seed=10 * i + n, dtype=dtype, gradient=False) for n in sizes] for i in range(4)]
    lists[3] = [tensor.abs() for tensor in lists[3]]
    exact = [[tensor.double() for tensor in tensors] for tensors in lists]
    own = [[tensor.clone() for tensor in tensors] for tensors in lists]
    on = on_npu(lists)
    fused, seen = torch._fused_adamw_, []
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **options: seen.append(fused(*args, **options)))
    adamw_(*on, step)
    reference(*exact, step)
    reference(*own, step)
    for mine, plain, true in zip(*(pytree.tree_leaves(tensors) for tensors in (on, own, exact)), strict=True):
        assert error(mine, true) <= 2 * error(plain, true)
    assert len(seen) == 1


def test_every_kernel_passes_its_check_and_none_is_lacking():
    assert {operator.name: operator.check(NPU) for operator in OPERATORS} == {name: None for name, _ in report()}
    assert all(reason == "" for _, reason in report())


def test_a_wrong_kernel_is_refused_on_the_npu_and_the_reference_is_used(monkeypatch, calls):
    suspect = dataclasses.replace(swiglu)
    true = torch_npu.npu_swiglu
    monkeypatch.setattr(torch_npu, "npu_swiglu", lambda x, dim: true(x.flip(dim), dim))
    message = suspect.check(NPU)
    assert "the NPU kernel of swiglu is wrong on npu: in torch.float32 result 0 is off by" in message
    assert suspect.why_unavailable().reason == message
    calls.clear()
    x = drawn(3, 8, seed=1, dtype=torch.float32)
    assert error(suspect(x.npu()).detach(), swiglu.reference(x.detach().double())) < 1e-6
    assert not calls


def test_a_kernel_whose_gradient_alone_is_wrong_is_refused(monkeypatch):
    suspect = dataclasses.replace(rms_norm)
    true = torch_npu.npu_rms_norm
    monkeypatch.setattr(torch_npu, "npu_rms_norm", lambda x, gamma, eps: true(x, gamma.detach() * 1.0, eps))
    assert "raises RuntimeError" in suspect.check(NPU)
    assert suspect.why_unavailable()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_operator_waits_for_the_device(case: Case, monkeypatch):
    args = on_npu(case.args(torch.bfloat16))
    for name in ("item", "cpu", "tolist", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the host waits for the device"))
    outcome(case.operator, args)
