"""The references of the operators of experts, in float64, against their formulas."""

from __future__ import annotations

import pytest
import torch
from expert_formulas import FORMULAS, results

from ds_npu.acceptance.expert_cases import SMALL_EXPERTS
from ds_npu.ops.grouped_matmul import grouped_matmul, grouped_outer
from ds_npu.ops.token_permutation import token_permute, token_unpermute


@pytest.mark.parametrize("call", SMALL_EXPERTS, ids=lambda call: call.name)
def test_references_compute_what_the_formulas_say(call):
    args = call.args(torch.float64)
    expected = results(FORMULAS[call.function](*args))
    for found, right in zip(results(call.function.reference(*args)), expected, strict=True):
        assert found.dtype == right.dtype and torch.allclose(found, right, rtol=1e-13, atol=1e-13)


def test_no_row_at_all():
    none, counts = torch.zeros(0, 4), torch.zeros(3, dtype=torch.int64)
    assert grouped_matmul(none, torch.ones(3, 4, 5), counts).shape == (0, 5)
    assert torch.equal(grouped_outer(none, torch.zeros(0, 2), counts), torch.zeros(3, 4, 2))
    rows, places = token_permute(none, torch.zeros(0, 2, dtype=torch.int64), 0)
    assert (rows.shape, places.shape) == ((0, 4), (0,))
    assert torch.equal(token_unpermute(none, torch.zeros(3, 2, dtype=torch.int32)), torch.zeros(3, 4))
