"""Dropout in npu_fusion_attention: torch_npu draws the mask, and both passes use the same one."""

from itertools import accumulate

import pytest
import torch
import torch_npu
from agreement import FLOATING, agree, numbers, on_npu
from attention_reference import attention, compressed_mask, hidden_in_mode
from hypothesis import given, settings
from hypothesis import strategies as st

HEADS, KEY_HEADS, SIZE = 4, 2, 48


def kept_weights(shape: tuple[int, int, int], seed: int, keep_prob: float, layout: str = "BNSD") -> torch.Tensor:
    """Which weights [batch, heads, rows, keys] a call after ``manual_seed(seed)`` keeps: with all weights the same
    and a value that is the identity, the result is the dropped weights themselves."""
    batch, rows, keys = shape
    torch.npu.manual_seed(seed)
    query, key = torch.zeros(batch, HEADS, rows, SIZE), torch.zeros(batch, KEY_HEADS, keys, SIZE)
    value = torch.eye(keys, SIZE).expand(batch, KEY_HEADS, keys, SIZE)
    if layout == "BSND":
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out = torch_npu.npu_fusion_attention(query.npu(), key.npu(), value.npu(), HEADS, layout, keep_prob=keep_prob)[
        0
    ].cpu()
    if layout == "BSND":
        out = out.transpose(1, 2)
    kept = out[..., :keys] != 0
    torch.testing.assert_close(out[..., :keys], kept / (keys * keep_prob))
    return kept.double()


@settings(max_examples=25)
@given(
    st.tuples(st.integers(1, 2), st.sampled_from((1, 7, 33)), st.sampled_from((1, 5, 48))),
    st.sampled_from(FLOATING),
    st.sampled_from((0.25, 0.9)),
    st.sampled_from((None, 3)),
    st.sampled_from(("BNSD", "BSND")),
    st.integers(0, 99),
)
def test_both_passes_drop_the_same_weights(shape, dtype, keep_prob, mode, layout, seed):
    batch, rows, keys = shape
    kept = kept_weights(shape, seed, keep_prob, layout)
    query, key, value, upstream = (
        numbers(batch, heads, length, SIZE, seed=seed + i, dtype=dtype)
        for i, (heads, length) in enumerate(((HEADS, rows), (KEY_HEADS, keys), (KEY_HEADS, keys), (HEADS, rows)))
    )
    hidden = torch.zeros(rows, keys, dtype=torch.bool) if mode is None else hidden_in_mode(mode, rows, keys)
    options = {} if mode is None else {"atten_mask": compressed_mask().npu(), "sparse_mode": mode}
    wanted = attention(query, key, value, upstream, hidden, scale=0.2, dtype=dtype, kept=kept, keep_prob=keep_prob)

    def laid(tensor):
        return tensor.transpose(1, 2) if layout == "BSND" else tensor

    on = [on_npu(laid(tensor), dtype).requires_grad_() for tensor in (query, key, value)]
    torch.npu.manual_seed(seed)
    out, _, total, *_ = torch_npu.npu_fusion_attention(*on, HEADS, layout, scale=0.2, keep_prob=keep_prob, **options)
    agree(out, laid(wanted.out), laid(wanted.magnitudes["out"]))
    agree(total, wanted.sum[..., None].expand(*wanted.sum.shape, 8), wanted.magnitudes["sum"].expand(total.shape))
    gradients = torch.autograd.grad(out, on, on_npu(laid(upstream), dtype))
    for name, gradient in zip(("query", "key", "value"), gradients, strict=True):
        agree(gradient, laid(wanted.gradients[name]), laid(wanted.magnitudes[name]))


@pytest.mark.parametrize("dtype", FLOATING)
def test_packed_documents_drop_the_same_weights_in_both_passes(dtype):
    lengths, keep_prob, seed = [5, 0, 33, 12], 0.7, 3
    ends, rows = list(accumulate(lengths)), sum(lengths)
    options = {"keep_prob": keep_prob, "actual_seq_qlen": ends, "actual_seq_kvlen": ends}
    torch.npu.manual_seed(seed)
    zeros = torch.zeros(rows, HEADS, SIZE).npu(), torch.zeros(rows, KEY_HEADS, SIZE).npu()
    identity = torch.cat([torch.eye(length, SIZE) for length in lengths])[:, None].expand(rows, KEY_HEADS, SIZE)
    revealed = torch_npu.npu_fusion_attention(*zeros, identity.npu(), HEADS, "TND", **options)[0].cpu()
    query, key, value, upstream = (
        numbers(rows, heads, SIZE, seed=seed + i, dtype=dtype)
        for i, heads in enumerate((HEADS, KEY_HEADS, KEY_HEADS, HEADS))
    )
    on = [on_npu(tensor, dtype).requires_grad_() for tensor in (query, key, value)]
    torch.npu.manual_seed(seed)
    out = torch_npu.npu_fusion_attention(*on, HEADS, "TND", scale=0.2, **options)[0]
    gradients = torch.autograd.grad(out, on, on_npu(upstream, dtype))
    for begin, length in zip([0, *ends[:-1]], lengths, strict=True):
        if length == 0:
            continue
        part = slice(begin, begin + length)
        kept = (revealed[part, :, :length] != 0).double().transpose(0, 1)[None]
        alone = attention(
            *(tensor[part].transpose(0, 1)[None] for tensor in (query, key, value, upstream)),
            torch.zeros(length, length, dtype=torch.bool),
            scale=0.2,
            dtype=dtype,
            kept=kept,
            keep_prob=keep_prob,
        )
        agree(out[part], alone.out[0].transpose(0, 1), alone.magnitudes["out"][0].transpose(0, 1))
        for name, gradient in zip(("query", "key", "value"), gradients, strict=True):
            agree(gradient[part], alone.gradients[name][0].transpose(0, 1), alone.magnitudes[name][0].transpose(0, 1))


@pytest.mark.parametrize("keep_prob", (0.1, 0.5, 0.95))
def test_the_share_of_kept_weights_is_keep_prob(keep_prob):
    kept = kept_weights((2, 100, 48), 1, keep_prob)
    deviation = (keep_prob * (1 - keep_prob) / kept.numel()) ** 0.5
    assert abs(kept.mean().item() - keep_prob) < 5 * deviation
    by_head = kept.mean((0, 2, 3))
    assert (by_head - keep_prob).abs().max() < 5 * deviation * HEADS**0.5


def test_other_seeds_and_later_calls_keep_other_weights():
    shape = (1, 20, 40)
    first = kept_weights(shape, 1, 0.5)
    assert torch.equal(first, kept_weights(shape, 1, 0.5))
    assert not torch.equal(first, kept_weights(shape, 2, 0.5))
    torch.npu.manual_seed(1)
    query, key = torch.zeros(1, HEADS, 20, SIZE).npu(), torch.zeros(1, HEADS, 40, SIZE).npu()
    value = torch.eye(40, SIZE).expand(1, HEADS, 40, SIZE).npu()
    calls = [torch_npu.npu_fusion_attention(query, key, value, HEADS, "BNSD", keep_prob=0.5)[0].cpu() for _ in range(2)]
    assert not torch.equal(*calls)


def test_a_mask_that_is_given_drops_by_its_bits_in_order():
    batch, rows, keys = 2, 5, 11
    kept = torch.rand(batch, HEADS, rows, keys, generator=torch.Generator().manual_seed(4)) < 0.6
    bits = torch.zeros((kept.numel() + 127) // 128 * 128, dtype=torch.uint8)
    bits[: kept.numel()] = kept.flatten()
    packed = (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)
    query, key, value, upstream = (
        numbers(batch, heads, length, SIZE, seed=i, dtype=torch.float32)
        for i, (heads, length) in enumerate(((HEADS, rows), (KEY_HEADS, keys), (KEY_HEADS, keys), (HEADS, rows)))
    )
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    wanted = attention(
        query, key, value, upstream, hidden, scale=0.2, dtype=torch.float32, kept=kept.double(), keep_prob=0.6
    )
    on = [on_npu(tensor, torch.float32) for tensor in (query, key, value)]
    out = torch_npu.npu_fusion_attention(*on, HEADS, "BNSD", scale=0.2, keep_prob=0.6, dropout_mask=packed.npu())[0]
    agree(out, wanted.out, wanted.magnitudes["out"])
