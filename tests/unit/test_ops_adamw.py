"""AdamW: the reference against torch's own optimizers in float64, and the scalars and the call of the kernel, which is
torch's own too and runs on the CPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_npu.ops import adamw
from ds_npu.ops.adamw import AdamStep, adamw_
from ds_npu.ops.npu import adamw as kernel

STEP = AdamStep(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, step=1)
SIZES = (5, 12)
both = pytest.mark.parametrize("run", [adamw.reference, kernel.adamw_], ids=["reference", "kernel"])


def fresh(dtype=torch.float64):
    """Parameters, gradients and both moments."""
    generator = torch.Generator().manual_seed(0)
    lists = [[torch.randn(size, generator=generator, dtype=dtype) for size in SIZES] for _ in range(4)]
    return [*lists[:3], [tensor.abs() for tensor in lists[3]]]


def same(left, right):
    return all(
        torch.equal(a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)
    )


@both
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_five_steps_are_those_of_torchs_optimizer(run, decoupled, decay):
    params, _, exp_avgs, exp_avg_sqs = fresh()
    theirs = [torch.nn.Parameter(param.clone()) for param in params]
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, lr=1e-2, weight_decay=decay, fused=False)
    for tensor in (*exp_avgs, *exp_avg_sqs):
        tensor.zero_()
    for number in range(1, 6):
        grads = [torch.randn(size, generator=torch.Generator().manual_seed(number)).double() for size in SIZES]
        step = dataclasses.replace(STEP, step=number, weight_decay=decay, decoupled=decoupled)
        run(params, grads, exp_avgs, exp_avg_sqs, step)
        for own, grad in zip(theirs, grads, strict=True):
            own.grad = grad
        optimizer.step()
    for param, m, v, own in zip(params, exp_avgs, exp_avg_sqs, theirs, strict=True):
        torch.testing.assert_close(param, own.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(m, optimizer.state[own]["exp_avg"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(v, optimizer.state[own]["exp_avg_sq"], rtol=1e-12, atol=1e-12)


@both
def test_without_bias_correction_the_moments_are_used_as_they_are(run):
    params, grads, exp_avgs, exp_avg_sqs = fresh()
    expected = []
    for p, g, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        m_next, v_next = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        expected.append(p - 1e-2 * 0.1 * p - 1e-2 * m_next / (v_next.sqrt() + 1e-8))
    run(params, grads, exp_avgs, exp_avg_sqs, dataclasses.replace(STEP, step=None))
    for param, true in zip(params, expected, strict=True):
        torch.testing.assert_close(param, true, rtol=1e-12, atol=1e-12)


@both
def test_an_overflow_changes_nothing_and_is_read_only_when_the_flag_was_written(run, monkeypatch):
    flag, lists = torch.ones(1, dtype=torch.int32), fresh()
    run(*lists, STEP, flag)
    assert same(lists, fresh())
    flag.zero_()
    run(*lists, STEP, flag)
    assert not same(lists, fresh())
    monkeypatch.setattr(torch.Tensor, "item", lambda _: pytest.fail("the host waits for the device in every call"))
    run(*lists, STEP, flag)


@both
def test_bf16_is_computed_in_float32_and_rounded_once(run):
    params, grads, exp_avgs, exp_avg_sqs = fresh(torch.bfloat16)
    exact = [[tensor.double() for tensor in tensors] for tensors in (params, grads, exp_avgs, exp_avg_sqs)]
    run(params, grads, exp_avgs, exp_avg_sqs, STEP)
    adamw.reference(*exact, STEP)
    for param, true in zip(params, exact[0], strict=True):
        # Half a unit in the last place, and what float32 may add to it.
        assert bool(((param.double() - true).abs() <= 1.01 * 2.0**-9 * 2.0 ** torch.ceil(torch.log2(true.abs()))).all())


@both
def test_parameters_that_require_gradients_are_changed_and_leave_no_graph(run):
    params, *others = fresh()
    wanting = [torch.nn.Parameter(param) for param in params]
    run(wanting, *others, dataclasses.replace(STEP, decoupled=False))
    assert all(tensor.grad_fn is None for tensor in (*wanting, *others[0], *others[1]))


@both
def test_a_learning_rate_of_zero_changes_the_moments_only(run):
    lists = fresh()
    run(*lists, dataclasses.replace(STEP, lr=0.0))
    assert same(lists[:1], fresh()[:1])
    assert not same(lists[2:], fresh()[2:])


@both
def test_an_empty_list_is_no_error(run):
    run([], [], [], [], STEP)


def test_the_operator_finds_the_device_in_its_list():
    params, *others = fresh()
    before = [param.clone() for param in params]
    adamw_(params, *others, STEP)
    assert not same([params], [before])


@pytest.mark.parametrize("step", [0, -3])
def test_a_step_below_one_is_refused(step):
    with pytest.raises(ValueError, match=f"step is {step}; it counts from 1"):
        dataclasses.replace(STEP, step=step)


@settings(deadline=None, max_examples=200)
@given(
    lr=st.floats(1e-8, 1.0),
    betas=st.tuples(st.floats(0.0, 0.99), st.floats(0.5, 0.99999)),
    eps=st.floats(1e-12, 1e-3),
    decay=st.floats(0.0, 1.0),
    step=st.one_of(st.none(), st.integers(1, 10**6)),
    second=st.floats(0.0, 10.0),
)
def test_kernel_scalars_give_the_same_update_at_the_kernels_step(lr, betas, eps, decay, step, second):
    beta1, beta2 = betas
    kernel_lr, kernel_eps, kernel_decay = kernel.kernel_scalars(AdamStep(lr, betas, eps, decay, step))
    wanted1, wanted2 = (1.0, 1.0) if step is None else (1 - beta1**step, 1 - beta2**step)
    kernel1, kernel2 = 1 - beta1**kernel.KERNEL_STEP, 1 - beta2**kernel.KERNEL_STEP
    got = kernel_lr / kernel1 / (math.sqrt(second / kernel2) + kernel_eps)
    assert got == pytest.approx(lr / wanted1 / (math.sqrt(second / wanted2) + eps), rel=1e-9)
    assert kernel_lr * kernel_decay == pytest.approx(lr * decay, rel=1e-12)


def test_the_kernel_adds_no_rounding_of_its_own():
    for beta in (0.9, 0.95, 0.99, 0.999, 0.9999):
        assert float(torch.tensor(1.0) - torch.tensor(beta) ** kernel.KERNEL_STEP) == 1.0


def test_the_kernel_makes_no_tensor_per_call_and_takes_all_in_one(monkeypatch):
    lists = fresh(torch.float32)
    kernel.adamw_(*lists, STEP)
    for maker in ("tensor", "full", "zeros", "as_tensor"):
        monkeypatch.setattr(torch, maker, lambda *_, **__: pytest.fail("a tensor is made in every call"))
    calls = []
    monkeypatch.setattr(torch, "_fused_adamw_", lambda params, *_, **__: calls.append(len(params)))
    kernel.adamw_(*lists, dataclasses.replace(STEP, step=2))
    assert calls == [len(SIZES)]
