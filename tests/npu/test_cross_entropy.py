"""The fused cross-entropy of torch_npu and its gradient, against CANN's formulas in float64."""

import pytest
import torch
import torch_npu
from agreement import FLOATING, agree, layouts, numbers, on_npu, rounded
from hypothesis import given, settings
from hypothesis import strategies as st

REDUCTIONS = ("none", "mean", "sum")


def cross_entropy(log_prob, target, weight, ignored, reduction):
    """(The losses or their reduction, what each row's loss was multiplied by)."""
    counted = target != ignored if ignored >= 0 else torch.ones_like(target, dtype=torch.bool)
    factor = weight[target] * counted
    factor = factor / factor.sum() if reduction == "mean" else factor
    losses = -factor * log_prob[torch.arange(len(target)), target]
    return (losses if reduction == "none" else losses.sum().reshape(1)), factor


@settings(max_examples=60)
@given(
    st.tuples(st.integers(1, 6), st.integers(2, 40)),
    st.sampled_from(FLOATING),
    st.sampled_from(REDUCTIONS),
    st.sampled_from((-100, 0)),
    st.booleans(),
    layouts(2),
)
def test_losses_and_gradients_follow_the_formulas(shape, dtype, reduction, ignored, weighted, layout):
    rows, words = shape
    value = 3 * numbers(rows, words, seed=1, dtype=dtype)
    value = rounded(value, dtype)
    target = torch.randint(0, words, (rows,), generator=torch.Generator().manual_seed(2))
    target[0] = words - 1  # a mean of nothing is not a number
    weight = numbers(words, seed=3, dtype=torch.float32).abs() + 0.5 if weighted else torch.ones(words).double()
    weight = rounded(weight, torch.float32)
    x = on_npu(value, dtype, layout).requires_grad_()
    loss, log_prob, *_ = torch_npu.npu_cross_entropy_loss(
        x, target.npu(), weight.float().npu() if weighted else None, reduction, ignored
    )
    exact = value.log_softmax(1)
    expected, factor = cross_entropy(exact, target, weight, ignored, reduction)
    # In float32: the logarithm of a sum of `words` terms, and a sum over the rows.
    roundings = words + rows + 12 if dtype == torch.float32 else 1.1
    span = value.abs().amax(1) + exact.abs().amax(1)
    terms = span * factor.abs()
    agree(log_prob.detach(), exact, exact.abs() + span.unsqueeze(1), roundings)
    agree(loss.detach(), expected, terms if reduction == "none" else terms.sum().reshape(1), roundings)
    upstream = numbers(*loss.shape, seed=4, dtype=dtype)
    loss.backward(on_npu(upstream, dtype))
    # The gradient starts from the rounded log-probabilities.
    probability, of_row = log_prob.detach().cpu().double().exp(), (factor * upstream).unsqueeze(1)
    hot = torch.nn.functional.one_hot(target, words)
    agree(x.grad, (probability - hot) * of_row, (probability + hot) * of_row.abs(), 16 if roundings > 2 else roundings)


def test_a_negative_ignored_index_ignores_nothing():
    logits, target = torch.zeros(3, 8).npu(), torch.tensor([1, 2, 3]).npu()
    losses = torch_npu.npu_cross_entropy_loss(logits, target, reduction="none", ignore_index=-1)[0]
    agree(losses, torch.full((3,), 8.0, dtype=torch.float64).log(), roundings=4)


def test_an_ignored_token_gives_nothing_even_if_its_first_logit_is_minus_infinity():
    logits = torch.zeros(2, 4)
    logits[:, 0] = -torch.inf
    x = logits.npu().requires_grad_()
    losses = torch_npu.npu_cross_entropy_loss(x, torch.tensor([2, 1]).npu(), reduction="none", ignore_index=2)[0]
    losses.backward(torch.ones(2).npu())
    assert losses[0].item() == 0 and not x.grad[0].any().item()
    agree(losses.detach()[1:], torch.tensor([3.0], dtype=torch.float64).log(), roundings=4)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_language_model_targets_as_int64_of_a_view(dtype):
    logits, tokens = numbers(5, 11, seed=1, dtype=dtype), torch.tensor([[1, 9, 0, 3, 10, 2], [7, 7, 7, 7, 7, 7]])
    found = torch_npu.npu_cross_entropy_loss(on_npu(logits, dtype), tokens.npu()[0, 1:], reduction="sum")[0]
    expected = -logits.log_softmax(1)[torch.arange(5), tokens[0, 1:]].sum().reshape(1)
    agree(found, expected, expected + 40, roundings=8 if dtype == torch.float32 else 1.1)
