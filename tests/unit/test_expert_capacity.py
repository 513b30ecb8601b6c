"""Which choices of an expert are within its capacity: against a loop over tokens."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from expert_capacity import limited
from hypothesis import given
from hypothesis import strategies as st

from ds_npu.parallel.expert.capacity import capacity_of, within_capacity


@given(
    st.integers(0, 20), st.integers(1, 4), st.integers(4, 7), st.sampled_from(["probs", "position"]), st.integers(0, 9)
)
def test_choices_beyond_the_capacity_are_dropped(tokens, choices, experts, policy, seed):
    torch.manual_seed(seed)
    ids = torch.rand(tokens, experts).argsort(1)[:, :choices]
    ids = torch.where(torch.rand(tokens, choices) < 0.2, -1, ids)
    # Few values, so that weights are equal.
    weights = torch.randint(0, 3, (tokens, choices)).double()
    for capacity in (1, 3, 20):
        found = within_capacity(ids, weights, experts, capacity, policy)
        assert found.tolist() == limited(ids, weights, capacity, policy).tolist()


@pytest.mark.parametrize(
    ("sizes", "factor", "expected"),
    [((10, 1, 1), 1.1, 11), ((10, 2, 4), 1.0, 5), ((3, 2, 4), 1.0, 2), ((0, 2, 4), 1.0, 0), ((8, 2, 64), 0.01, 1)],
)
def test_the_capacity_is_the_share_times_the_factor_rounded_up(sizes, factor, expected):
    tokens, choices, experts = sizes
    assert capacity_of(tokens, choices, experts, factor) == expected
    assert expected == math.ceil(Fraction(tokens * choices, experts) * Fraction(str(factor)))


def test_weights_have_no_gradient_of_being_compared():
    weights = torch.rand(4, 2, requires_grad=True)
    assert not within_capacity(torch.zeros(4, 2, dtype=torch.int64), weights, 2, 1, "probs").requires_grad
