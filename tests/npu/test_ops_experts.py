"""The operators of experts on NPU tensors: the kernel is what runs, and it computes what the formula says."""

from __future__ import annotations

import pytest
import torch
import torch_npu
from expert_formulas import FORMULAS, results
from torch.utils import _pytree as pytree

from ds_npu.acceptance.expert_cases import SMALL_EXPERTS
from ds_npu.ops.grouped_matmul import grouped_matmul, grouped_outer
from ds_npu.ops.token_permutation import token_permute, token_unpermute

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDINGS = 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", SMALL_EXPERTS, ids=lambda call: call.name)
def test_the_kernel_runs_and_is_right(call, dtype, monkeypatch):
    calls = []
    for name in call.function.needs:
        original = vars(torch_npu)[name]
        monkeypatch.setattr(
            torch_npu, name, lambda *a, original=original, **k: calls.append(original) or original(*a, **k)
        )
    args = call.args(dtype)
    wide = pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, args)
    expected = results(FORMULAS[call.function](*wide))
    found = results(call.function(*pytree.tree_map_only(torch.Tensor, lambda x: x.npu(), args)))
    for mine, right in zip(found, expected, strict=True):
        assert mine.device.type == "npu" and mine.shape == right.shape
        if not mine.is_floating_point():
            assert torch.equal(mine.cpu(), right)
            continue
        allowed = ROUNDINGS * torch.finfo(mine.dtype).eps * right.abs().max()
        assert (mine.cpu().double() - right).abs().max() <= allowed
    in_float32 = dtype == torch.float32 and call.function.name == "grouped_outer_accumulate"
    assert len(calls) == (0 if in_float32 else 1)


def test_no_row_at_all():
    none, counts = torch.zeros(0, 4).npu(), torch.zeros(3, dtype=torch.int64).npu()
    assert grouped_matmul(none, torch.ones(3, 4, 5).npu(), counts).shape == (0, 5)
    assert torch.equal(grouped_outer(none, torch.zeros(0, 2).npu(), counts).cpu(), torch.zeros(3, 4, 2))
    rows, places = token_permute(none, torch.zeros(0, 2, dtype=torch.int64).npu(), 0)
    assert (rows.shape, places.shape) == ((0, 4), (0,))
    zeros = token_unpermute(none, torch.zeros(3, 2, dtype=torch.int32).npu())
    assert torch.equal(zeros.cpu(), torch.zeros(3, 4))
    ids = torch.tensor([[0, 1], [1, 2]]).npu()
    rows, places = token_permute(torch.ones(2, 4).npu(), ids, 0)
    assert rows.shape == (0, 4) and places.tolist() == [0, 1, 2, 3]
