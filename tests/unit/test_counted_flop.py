"""FLOP of attentions by their masks, against counting pairs one by one."""

from __future__ import annotations

import pytest
import torch

from ds_npu.features.watch.counted_flop import Flop, attention_flop, grouped_flop, npu_fused_flop, visible_pairs
from ds_npu.ops.attention.mask import CAUSAL, FULL, Mask, sliding
from ds_npu.zero_ext.step_flop import StepFlop

B, N, S, D, V = 2, 4, 8, 6, 5


def counted(mask: Mask, rows: int, keys: int) -> int:
    """The pairs that the definition of a mask lets see each other."""
    corner = 0 if mask.from_start else keys - rows
    return sum(
        (mask.before is None or key >= row + corner - mask.before)
        and (mask.after is None or key <= row + corner + mask.after)
        for row in range(rows)
        for key in range(keys)
    )


@pytest.mark.parametrize("sizes", [(8, 8), (5, 9), (9, 5)])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, sliding(3), Mask(after=0, from_start=True), Mask(2, 1)])
def test_visible_pairs(mask, sizes):
    assert visible_pairs(mask, *sizes) == counted(mask, *sizes)


def given(layout: str, **more: object) -> dict:
    """The arguments of npu_fusion_attention: 4 heads of width 6, 2 of keys, and of values of width 5."""
    shapes = {
        "BSND": ((B, S, N, D), (B, S, 2, D), (B, S, 2, V)),
        "BNSD": ((B, N, S, D), (B, 2, S, D), (B, 2, S, V)),
        "SBH": ((S, B, N * D), (S, B, 2 * D), (S, B, 2 * V)),
        "BSH": ((B, S, N * D), (B, S, 2 * D), (B, S, 2 * V)),
        "TND": ((B * S, N, D), (B * S, 2, D), (B * S, 2, V)),
    }
    q, k, v = (torch.zeros(shape) for shape in shapes[layout])
    return {"query": q, "key": k, "value": v, "head_num": N, "input_layout": layout, **more}


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "SBH", "BSH"])
def test_an_npus_attention(layout):
    triangle = torch.ones(2048, 2048, dtype=torch.bool).triu_(1)
    for mode, pairs in ((0, S * S), (2, S * (S + 1) // 2), (3, S * (S + 1) // 2)):
        found = given(layout, sparse_mode=mode, atten_mask=triangle if mode else None)
        forward, backward = (npu_fused_flop(found, backward=each) for each in (False, True))
        assert forward == Flop(2 * B * pairs * N * (D + V), 2 * B * pairs * N * (D + V))
        assert backward == Flop(4 * B * pairs * N * (D + V), 2 * B * pairs * N * (3 * D + 2 * V))
    band = given(layout, sparse_mode=4, atten_mask=triangle, pre_tockens=2, next_tockens=0)
    assert npu_fused_flop(band, backward=False).model == 2 * B * (3 * S - 3) * N * (D + V)
    dense = torch.zeros(1, 1, S, S, dtype=torch.bool)
    dense[..., 5:] = True
    whole = given(layout, sparse_mode=1, atten_mask=dense)
    assert npu_fused_flop(whole, backward=False).model == 2 * B * 5 * S * N * (D + V)


def test_documents_count_by_their_lengths():
    triangle = torch.ones(2048, 2048, dtype=torch.bool).triu_(1)
    ends = [3, 10, B * S]
    found = given("TND", sparse_mode=3, atten_mask=triangle, actual_seq_qlen=ends, actual_seq_kvlen=ends)
    pairs = sum(length * (length + 1) // 2 for length in (3, 7, 6))
    assert npu_fused_flop(found, backward=False).model == 2 * pairs * N * (D + V)


def test_groups_of_rows():
    rows, weights, gradients = torch.zeros(10, 4), torch.zeros(3, 4, 6), torch.zeros(10, 6)
    assert grouped_flop({"self": rows, "mat2": weights}).model == 2 * 10 * 4 * 6
    assert grouped_flop({"x": [rows], "weight": [weights]}).model == 2 * 10 * 4 * 6
    assert grouped_flop({"x": [rows.T], "weight": [gradients]}).model == 2 * 10 * 4 * 6
    assert grouped_flop({"input": torch.zeros(3, 4, 6), "x": rows, "weight": gradients}).model == 2 * 10 * 4 * 6


def test_shares_of_the_peak():
    found = StepFlop(model=6e12, executed=8e12, six_nd=None, peak=2 * 1e13)
    assert (found.mfu(0.5), found.hfu(0.5)) == (0.6, 0.8)
    assert attention_flop(1, (1, 1), (1, 2), backward=True) == Flop(8, 20)
