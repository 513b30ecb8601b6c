"""Linear attention in chunks, and the causal convolution, against the recurrence token by token, in float64."""

from __future__ import annotations

import pytest
import torch
from recurrences import convolved, drawn_inputs, recurrent

from ds_npu.ops.causal_convolution import causal_convolution
from ds_npu.ops.linear_attention import CHUNK, Recurrence, chunks_of, inverted, linear_attention

CLOSE = {"rtol": 0, "atol": 1e-12}
LENGTHS = (1, 2, 37, CHUNK, 2 * CHUNK + 5)


def documents(length: int, batch: int) -> torch.Tensor:
    """Documents whose ends differ from sample to sample, some of one token."""
    begins = torch.rand(batch, length, generator=torch.Generator().manual_seed(3)) < 0.1
    return begins.cumsum(1)


def cast(tokens: Recurrence, dtype: torch.dtype) -> Recurrence:
    return Recurrence(*(each if each is None else each.detach().to(dtype) for each in tokens))


def gradients(outputs: tuple[torch.Tensor, ...], leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    upstream = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outputs]
    return torch.autograd.grad(outputs, leaves, upstream, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "state space"])
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_are_the_recurrence(length, delta, packed):
    inputs = drawn_inputs(2, length, delta)
    segments = documents(length, 2) if packed else None
    state = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    leaves = [each for each in (*inputs, state) if each is not None]
    found, expected = (each(inputs, segments, state) for each in (linear_attention, recurrent))
    for mine, true in zip((*found, *gradients(found, leaves)), (*expected, *gradients(expected, leaves)), strict=True):
        torch.testing.assert_close(mine, true, **CLOSE)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "state space"])
def test_a_summary_maps_any_state(delta, packed):
    inputs = drawn_inputs(2, CHUNK + 7, delta)
    segments = documents(CHUNK + 7, 2) if packed else None
    summary = chunks_of(inputs, segments).summary()
    for seed in (1, 2):
        state = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        torch.testing.assert_close(summary(state), recurrent(inputs, segments, state)[1], **CLOSE)


def test_equal_keys_without_decay_lose_no_digits():
    """The powers of their matrix exceed its inverse by 18 orders of magnitude."""
    q, k, v = (torch.ones(1, 2 * CHUNK, 1, width) / 2 for width in (4, 4, 5))
    v = v * torch.arange(2 * CHUNK)[:, None, None]
    decay, beta = torch.zeros(1, 2 * CHUNK, 1), torch.ones(1, 2 * CHUNK, 1)
    out, _ = linear_attention(Recurrence(q, k, v, decay, beta))
    assert out.dtype == torch.float32
    # Each token overwrites the value of the one before.
    torch.testing.assert_close(out, v, rtol=1e-6, atol=1e-5)


def test_an_inverse_is_that_of_float64():
    lower = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = lower.tril(-1) / 8 + torch.eye(64, dtype=torch.float64)
    torch.testing.assert_close(inverted(lower / 8), torch.linalg.inv(whole), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "state space"])
def test_states_of_half_precision_are_float32(dtype, delta):
    inputs = cast(drawn_inputs(1, 3 * CHUNK, delta), dtype)
    out, state = linear_attention(inputs)
    assert out.dtype == dtype and state.dtype == torch.float32
    true, last = recurrent(cast(inputs, torch.float64))
    torch.testing.assert_close(state.double(), last, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), true, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("halo", [False, True])
def test_a_convolution_takes_its_halo_and_ends_with_a_document(length, halo, packed):
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, length, 5), (5, 4), (5,), (2, 3, 5))
    x, weight, bias, before = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    )
    segments = documents(length, 2) if packed else None
    leaves = [x, weight, bias, *([before] if halo else [])]
    found, expected = (
        each(x, weight, bias, segments, before if halo else None) for each in (causal_convolution, convolved)
    )
    pairs = zip((found, *gradients((found,), leaves)), (expected, *gradients((expected,), leaves)), strict=True)
    for mine, true in pairs:
        torch.testing.assert_close(mine, true, **CLOSE)
