"""Losses and their gradients."""

import pytest
import torch
from accumulation import agree_rounded_once, float64, placed, with_gradients
from agreement import FLOATING, layouts, numbers, on_npu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

REDUCTIONS = ("none", "mean", "sum")


def labels(*shape: int, classes: int, seed: int, ignored: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, classes, shape, generator=generator)
    if ignored is not None:
        target[torch.rand(shape, generator=generator) < 0.3] = ignored
    return target


@pytest.mark.parametrize("reduction", REDUCTIONS)
@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(2, 7), st.sampled_from(FLOATING), st.booleans(), st.data())
def test_a_negative_log_likelihood_and_its_gradient_round_once(reduction, n, classes, dtype, weighted, data):
    ignored = data.draw(st.sampled_from((-100, 0)))
    target = labels(n, classes=classes, seed=3, ignored=ignored)
    target[0] = classes - 1  # a mean of nothing is not a number
    value = numbers(n, classes, seed=1, dtype=dtype)
    weight = numbers(classes, seed=2, dtype=dtype).abs() + 1 if weighted else None
    weight = weight if weight is None else weight.to(dtype).double()

    def loss(x, place=lambda t: t):
        return functional.nll_loss(
            x,
            place(target),
            None if weight is None else place(weight).to(x.dtype),
            ignore_index=ignored,
            reduction=reduction,
        )

    shape = (n,) if reduction == "none" else ()
    upstream = torch.rand(shape, dtype=torch.float64).add(0.5).to(dtype).double()
    leaves = placed([value], dtype, [data.draw(layouts(2))])
    found, grad = with_gradients(lambda x: loss(x, lambda t: t.npu()), leaves, upstream.to(dtype).npu())
    expected, true = with_gradients(loss, float64([value]), upstream)
    magnitude = loss(-value.abs())
    agree_rounded_once(found, expected, (2 * n + 4) * magnitude)
    # The sum of the weights, by which a mean is divided, is kept in the dtype of the input.
    slack = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps if reduction == "mean" and weighted else 0
    agree_rounded_once(grad, true, (n + 4 + slack) * true)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(2, 40), st.booleans(), st.booleans())
def test_a_cross_entropy_and_its_gradient_are_right(reduction, smoothing, n, classes, weighted, ignore):
    value = 4 * numbers(n, classes, seed=1, dtype=torch.float32)
    target = labels(n, classes=classes, seed=3, ignored=-100 if ignore else None)
    target[0] = classes - 1
    weight = (numbers(classes, seed=2, dtype=torch.float32).abs() + 0.5).float().double() if weighted else None

    def loss(x, place=lambda t: t):
        return functional.cross_entropy(
            x,
            place(target),
            None if weight is None else place(weight).to(x.dtype),
            reduction=reduction,
            label_smoothing=smoothing,
        )

    shape = (n,) if reduction == "none" else ()
    upstream = numbers(*shape, seed=5, dtype=torch.float32)
    leaves = placed([value], torch.float32, [None])
    found, grad = with_gradients(lambda x: loss(x, lambda t: t.npu()), leaves, upstream.float().npu())
    expected, true = with_gradients(loss, float64([value]), upstream)
    # Of each row: the largest logarithm that is formed, times the roundings on its way.
    size = (value.amax(1) - value.amin(1) + 4).sum()
    agree_rounded_once(found, expected, (classes + n + 12) * size * (1 if weight is None else weight.max()))
    agree_rounded_once(
        grad, true, (classes + n + 12) * size * upstream.abs().max() * (1 if weight is None else weight.max())
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_cross_entropy_over_pixels_is_right(reduction):
    value, target = numbers(2, 5, 3, 4, seed=1, dtype=torch.float32), labels(2, 3, 4, classes=5, seed=2, ignored=-100)
    shape = (2, 3, 4) if reduction == "none" else ()
    upstream = numbers(*shape, seed=5, dtype=torch.float32)
    leaves = placed([value], torch.float32, [None])
    found, grad = with_gradients(
        lambda x: functional.cross_entropy(x, target.npu(), reduction=reduction), leaves, upstream.float().npu()
    )
    expected, true = with_gradients(
        lambda x: functional.cross_entropy(x, target, reduction=reduction), float64([value]), upstream
    )
    agree_rounded_once(found, expected, 40 * (expected.abs() + 8))
    agree_rounded_once(grad, true, 40 * upstream.abs().max().expand(true.shape))


def test_the_loss_of_a_language_model_is_that_of_the_shifted_tokens():
    logits, tokens = numbers(2, 6, 50, seed=1, dtype=torch.float32), labels(2, 6, classes=50, seed=2)
    loss = lambda x, t: functional.cross_entropy(x[:, :-1].reshape(-1, 50), t[:, 1:].reshape(-1))  # noqa: E731
    agree_rounded_once(loss(logits.float().npu(), tokens.npu()), loss(logits, tokens), torch.tensor(400.0))


PAIRWISE = {
    "mse_loss": functional.mse_loss,
    "l1_loss": functional.l1_loss,
    "smooth_l1_loss": functional.smooth_l1_loss,
    "binary_cross_entropy_with_logits": functional.binary_cross_entropy_with_logits,
    "kl_div": functional.kl_div,
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", PAIRWISE)
@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from(FLOATING), st.data())
def test_a_loss_of_pairs_and_its_gradient_round_once(name, reduction, m, n, dtype, data):
    function = PAIRWISE[name]
    value, target = numbers(m, n, seed=1, dtype=dtype), numbers(m, n, seed=2, dtype=dtype).abs().clamp(0.125, 0.875)
    other = on_npu(target, dtype, data.draw(layouts(2)))
    upstream = numbers(*((m, n) if reduction == "none" else ()), seed=3, dtype=dtype)
    leaves = placed([value], dtype, [data.draw(layouts(2))])
    found, grad = with_gradients(lambda x: function(x, other, reduction=reduction), leaves, upstream.to(dtype).npu())
    expected, true = with_gradients(lambda x: function(x, target, reduction=reduction), float64([value]), upstream)
    size = (value.abs() + target.abs() + 1).square()
    total = size if reduction == "none" else size.sum() / (m * n if reduction == "mean" else 1)
    agree_rounded_once(found, expected, (m * n + 12) * total)
    agree_rounded_once(grad, true, 12 * upstream.abs() * size / (m * n if reduction == "mean" else 1))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_binary_cross_entropy_with_weights_and_its_gradient_are_right(reduction):
    value = (numbers(4, 5, seed=1).sigmoid().clamp(0.1, 0.9)).float().double()
    target, weight = numbers(4, 5, seed=2).sigmoid().float().double(), numbers(4, 5, seed=3).abs().float().double()
    shape = (4, 5) if reduction == "none" else ()
    upstream = numbers(*shape, seed=5, dtype=torch.float32)
    functions = {
        "probabilities": lambda x, t, w: functional.binary_cross_entropy(x, t, w, reduction=reduction),
        "logits": lambda x, t, w: functional.binary_cross_entropy_with_logits(
            x, t, w, pos_weight=w, reduction=reduction
        ),
    }
    for function in functions.values():
        found = with_gradients(
            lambda x, f=function: f(x, target.float().npu(), weight.float().npu()),
            placed([value], torch.float32, [None]),
            upstream.float().npu(),
        )
        expected = with_gradients(lambda x, f=function: f(x, target, weight), float64([value]), upstream)
        for mine, true in zip(found, expected, strict=True):
            agree_rounded_once(mine, true, torch.full(true.shape, 4000.0))
