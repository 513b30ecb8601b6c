"""npu_ring_attention_update makes of attention over two sets of keys the attention over both."""

from itertools import accumulate

import torch
import torch_npu
from agreement import FLOATING, agree, layouts, numbers, on_npu
from hypothesis import given, settings
from hypothesis import strategies as st

HEADS, SIZE = 3, 8


def statistics(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Maxima and (positive) sums of a softmax as float32 holds them, in float64."""
    maximum = 5 * numbers(*shape, seed=seed, dtype=torch.float32)
    return maximum.float().double(), (1 + numbers(*shape, seed=seed + 1, dtype=torch.float32).abs()).float().double()


def merged(parts, spread):
    """Out, maximum, sum of both parts and the terms' absolute sum; ``spread`` makes statistics broadcast to an out."""
    (out, maximum, total), (other, other_maximum, other_total) = parts
    both = torch.maximum(maximum, other_maximum)
    weight, other_weight = (maximum - both).exp() * total, (other_maximum - both).exp() * other_total
    whole = weight + other_weight
    terms = out * spread(weight / whole), other * spread(other_weight / whole)
    return sum(terms), both, whole, terms[0].abs() + terms[1].abs()


def eight(statistic: torch.Tensor) -> torch.Tensor:
    return statistic[..., None].repeat(*[1] * statistic.dim(), 8)


# exp of a difference of maxima is off by the rounding of that difference: up to 2^-24 times 20 or so
# for weights that count
ROUNDINGS = 24


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 3), st.sampled_from(FLOATING), layouts(3), layouts(4), st.integers(0, 99))
def test_merging_in_layout_sbh_agrees_with_float64(rows, batch, dtype, layout, statistics_layout, seed):
    parts = [
        (
            numbers(rows, batch, HEADS * SIZE, seed=seed + i, dtype=dtype),
            *statistics((batch, HEADS, rows), seed + 5 + i),
        )
        for i in (0, 10)
    ]
    on = [
        tensor
        for out, maximum, total in parts
        for tensor in (
            on_npu(out, dtype, layout),
            on_npu(eight(maximum), torch.float32, statistics_layout),
            on_npu(eight(total), torch.float32),
        )
    ]

    def spread(weights):
        return weights.permute(2, 0, 1).repeat_interleave(SIZE, 2)

    wanted, maximum, total, terms = merged(parts, spread)
    found = torch_npu.npu_ring_attention_update(*on)
    unit = torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
    agree(found[0], wanted, wanted.abs() + ROUNDINGS / 2 * unit * terms)
    agree(found[1], eight(maximum), roundings=0)
    agree(found[2], eight(total), roundings=ROUNDINGS)


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any),
    st.sampled_from(FLOATING),
    st.sampled_from(("", "SBH", "TND")),
    st.booleans(),
    st.integers(0, 99),
)
def test_merging_in_layout_tnd_agrees_with_float64(lengths, dtype, softmax_layout, from_zero, seed):
    rows = sum(lengths)
    parts = [
        (numbers(rows, HEADS, SIZE, seed=seed + i, dtype=dtype), *statistics((rows, HEADS), seed + 5 + i))
        for i in (0, 10)
    ]

    def laid(statistic):
        if softmax_layout == "TND":
            return eight(statistic)
        # by head within each document, whatever the shape says
        pieces = [piece.transpose(0, 1).reshape(-1, HEADS, 8) for piece in eight(statistic).split(lengths)]
        return torch.cat(pieces)

    on = [
        tensor
        for out, maximum, total in parts
        for tensor in (on_npu(out, dtype), laid(maximum).float().npu(), laid(total).float().npu())
    ]
    ends = torch.tensor([0] * from_zero + list(accumulate(lengths))).npu()
    found = torch_npu.npu_ring_attention_update(
        *on, actual_seq_qlen=ends, input_layout="TND", input_softmax_layout=softmax_layout
    )
    wanted, maximum, total, terms = merged(parts, lambda weights: weights[..., None])
    unit = torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
    agree(found[0], wanted, wanted.abs() + ROUNDINGS / 2 * unit * terms)
    agree(found[1], laid(maximum), roundings=0)
    agree(found[2], laid(total), roundings=ROUNDINGS)


def test_attention_to_all_keys_is_attention_to_each_half_merged():
    batch, rows, keys, dtype = 2, 7, 10, torch.float32
    query, key, value = (
        on_npu(numbers(length, batch, HEADS * SIZE, seed=i), dtype) for i, length in enumerate((rows, keys, keys))
    )

    def attend(k, v):
        return torch_npu.npu_fusion_attention(query, k, v, HEADS, "SBH", scale=0.3)[:3]

    whole = attend(key, value)
    found = torch_npu.npu_ring_attention_update(*attend(key[:4], value[:4]), *attend(key[4:], value[4:]))
    for one, wanted in zip(found, whole, strict=True):
        torch.testing.assert_close(one.cpu(), wanted.cpu(), rtol=1e-5, atol=1e-6)
