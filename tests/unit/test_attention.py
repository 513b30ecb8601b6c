"""Attention's reference agrees with the formula in float64, and its gradients with autograd's of the formula."""

import itertools
from dataclasses import replace

import pytest
import torch
from attention_formula import attention_formula, hidden_by_band, hidden_by_documents
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_npu.ops.attention import (
    CAUSAL,
    FULL,
    Inputs,
    Mask,
    Options,
    Result,
    attention,
    attention_backward,
    attention_forward,
    document,
    sliding,
)

HEADS = {"as many": (4, 4), "grouped": (4, 2), "one": (4, 1)}
WIDTHS = {"same": (8, 8), "narrower": (12, 8), "wider": (8, 12)}
BANDS = {
    "full": FULL,
    "causal": CAUSAL,
    "sliding": sliding(3),
    "both ways": Mask(before=2, after=1),
    "from the start": Mask(after=0, from_start=True),
    "behind": Mask(before=6, after=-2),
}


def numbers(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(heads=(4, 2), widths=(8, 8), rows=7, keys=7, batch=2, dtype=torch.float64):
    """q, k, v and the gradients of out and lse, [B, N, S, D]."""
    shapes = (
        (batch, heads[0], rows, widths[0]),
        (batch, heads[1], keys, widths[0]),
        (batch, heads[1], keys, widths[1]),
        (batch, heads[0], rows, widths[1]),
        (batch, heads[0], rows),
    )
    return [numbers(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def laid_out(x, layout):
    if layout == "BNSD":
        return x.clone()
    if layout == "BSND":
        return x.transpose(1, 2).contiguous()
    return x.permute(2, 0, 1, 3).flatten(2) if layout == "SBH" else x[0].transpose(0, 1).contiguous()


def heads_first(x, layout, heads):
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    return x.unflatten(2, (heads, -1)).permute(1, 2, 0, 3) if layout == "SBH" else x.transpose(0, 1)[None]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def check(tensors, hidden, options, with_dlse=True):
    """Forward and backward, in ``options.layout``, against the formula."""
    q, k, v, dout, dlse = tensors
    layout, heads = options.layout, (q.shape[1], k.shape[1], k.shape[1])
    scale = options.scale or q.shape[3] ** -0.5
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = attention_formula(*leaves, hidden, scale)
    seen = wanted_lse > -torch.inf
    target = (wanted * dout).sum() + ((wanted_lse * dlse)[seen].sum() if with_dlse else 0)
    gradients = torch.autograd.grad(target, leaves)

    own = [laid_out(x, layout).requires_grad_() for x in (q, k, v)]
    out, lse = attention(*own, options)
    close(heads_first(out, layout, heads[0]), wanted)
    close(lse.T[None] if layout == "TND" else lse, wanted_lse)
    upstream = [laid_out(dout, layout), dlse[0].T if layout == "TND" else dlse]
    found = torch.autograd.grad([out, lse] if with_dlse else [out], own, upstream if with_dlse else upstream[:1])
    for one, other, x, n in zip(found, gradients, own, heads, strict=True):
        assert one.shape == x.shape
        close(heads_first(one, layout, n), other)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", ("BNSD", "BSND", "SBH"))
@pytest.mark.parametrize("with_dlse", (True, False))
def test_every_layout_band_and_number_of_heads(layout, heads, band, with_dlse):
    mask = BANDS[band]
    hidden = hidden_by_band(7, 7, mask.before, mask.after, mask.from_start)
    options = Options(layout, mask, heads=4 if layout == "SBH" else 0)
    check(inputs(HEADS[heads]), hidden, options, with_dlse)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("layout", ("BNSD", "BSND", "SBH"))
@pytest.mark.parametrize("with_dlse", (True, False))
def test_values_of_another_width(widths, layout, with_dlse):
    options = Options(layout, CAUSAL, scale=0.2, heads=4 if layout == "SBH" else 0)
    check(inputs(widths=WIDTHS[widths]), hidden_by_band(7, 7, after=0), options, with_dlse)


@settings(max_examples=60)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.none() | st.integers(-3, 9),
    st.none() | st.integers(-3, 9),
    st.booleans(),
    st.sampled_from((1, 40, 1 << 24)),
)
def test_any_band_over_any_rows_and_keys_by_any_blocks(rows, keys, before, after, from_start, scores):
    if before is not None and after is not None and before + after < 0:
        after = -before
    mask = Mask(before, after, from_start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document, "BLOCK_SCORES", scores)
        hidden = hidden_by_band(rows, keys, before, after, from_start)
        check(inputs(rows=rows, keys=keys), hidden, Options("BSND", mask), with_dlse=False)


lengths = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4)


@settings(max_examples=60)
@given(lengths, st.sampled_from(sorted(BANDS)), st.booleans())
def test_packed_documents(pairs, band, with_dlse):
    ends_q, ends_k = (tuple(itertools.accumulate(each)) for each in zip(*pairs, strict=True))
    mask = BANDS[band]
    hidden = hidden_by_documents(ends_q, ends_k, before=mask.before, after=mask.after, from_start=mask.from_start)
    tensors = inputs(rows=ends_q[-1], keys=ends_k[-1], batch=1, widths=(8, 4))
    check(tensors, hidden, Options("TND", mask.packed(ends_q, ends_k)), with_dlse)


@pytest.mark.parametrize("shape", ((7, 9), (1, 1, 7, 9), (2, 1, 7, 9), (1, 4, 7, 9), (2, 4, 7, 9), (2, 1, 1, 9)))
def test_a_dense_mask_hides_where_it_is_true_and_may_empty_a_row(shape):
    dense = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    dense[..., -1, :] |= dense.shape[-2] > 1
    check(inputs(keys=9), dense.expand(2, 4, 7, 9), Options("BNSD", Mask(dense=dense)))
    if dense.shape[-2] > 1:
        out, lse = attention(*inputs(keys=9)[:3], Options("BNSD", Mask(dense=dense)))
        assert not out[:, :, -1].any() and bool((lse[:, :, -1] == -torch.inf).all())


def test_gradcheck():
    tensors = [x.requires_grad_() for x in inputs(rows=3, keys=4, batch=1)[:3]]
    for mask in (FULL, CAUSAL, sliding(2)):
        assert torch.autograd.gradcheck(lambda *x, m=mask: attention(*x, Options("BNSD", m)), tensors)


@pytest.mark.parametrize("mask", (FULL, CAUSAL), ids=("full", "causal"))
@pytest.mark.parametrize("widths", WIDTHS)
def test_backward_from_a_merged_lse_gives_each_part_of_the_keys_its_gradients(widths, mask):
    """What ring attention does: forward on each part, (out, lse) merged, backward on each part from the merged."""
    q, k, v, dout, _ = inputs(rows=6, keys=6, widths=WIDTHS[widths])
    whole = Options("BNSD", mask)
    early = Options("BNSD", Mask(after=0, from_start=True) if mask is CAUSAL else FULL)
    late = Options("BNSD", Mask(after=-3, from_start=True) if mask is CAUSAL else FULL)
    parts = [(Inputs(q, k[:, :, :3], v[:, :, :3]), early), (Inputs(q, k[:, :, 3:], v[:, :, 3:]), late)]
    results = [attention_forward(*part, options) for part, options in parts]
    lse = torch.logaddexp(results[0].lse, results[1].lse)
    out = sum(one.out * (one.lse - lse).exp()[..., None] for one in results)
    close(out, attention_forward(q, k, v, whole).out)
    found = [attention_backward(dout, part, Result(out, lse), options) for part, options in parts]
    wanted = attention_backward(dout, Inputs(q, k, v), attention_forward(q, k, v, whole), whole)
    close(found[0].q + found[1].q, wanted.q)
    close(torch.cat([found[0].k, found[1].k], 2), wanted.k)
    close(torch.cat([found[0].v, found[1].v], 2), wanted.v)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("mask", (CAUSAL, sliding(40)), ids=("causal", "sliding"))
def test_a_narrow_dtype_is_as_near_as_pytorchs_own(dtype, mask):
    q, k, v, dout, _ = inputs(rows=64, keys=64, dtype=dtype, widths=(32, 32))
    hidden = hidden_by_band(64, 64, mask.before, mask.after)

    def outcome(function, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out, lse = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout.to(dtype))], lse

    exact, exact_lse = outcome(lambda *x: attention_formula(*x, hidden, 0.2), torch.float64)
    plain, _ = outcome(lambda *x: attention_formula(*x, hidden, 0.2), dtype)
    found, lse = outcome(lambda *x: attention(*x, Options("BNSD", mask, 0.2)), dtype)
    assert lse.dtype == torch.float32 and found[0].dtype == dtype
    assert float((lse - exact_lse).detach().abs().max()) < (1e-5 if dtype == torch.float32 else 1e-3)
    for one, other, true in zip(found, plain, exact, strict=True):
        assert float((one - true).detach().abs().max()) <= 2 * float((other - true).detach().abs().max())


@pytest.mark.parametrize("mask", (CAUSAL, sliding(3)), ids=("causal", "sliding"))
def test_autocast_changes_nothing(mask):
    tensors = inputs(dtype=torch.bfloat16)

    def outcome():
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        out, lse = attention(*leaves, Options("BNSD", mask))
        return [out, lse, *torch.autograd.grad(out, leaves, tensors[3])]

    with torch.autocast("cpu", torch.bfloat16):
        found = outcome()
    for one, other in zip(found, outcome(), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def kept_weights(options, shape, keys):
    """Which weights the next call keeps: all are the same, and a value that is the identity shows them."""
    q, k = torch.zeros(*shape, 4).double(), torch.zeros(shape[0], shape[1] // 2, keys, 4).double()
    v = torch.eye(keys).double().expand(shape[0], shape[1] // 2, keys, keys)
    out, _ = attention(q, k, v, options)
    return out > 0


def test_dropout_is_drawn_anew_repeats_for_a_seed_and_keeps_its_share():
    options = Options("BNSD", FULL, dropout_p=0.3)
    torch.manual_seed(5)
    first, second = (kept_weights(options, (2, 4, 50), 60) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(first, kept_weights(options, (2, 4, 50), 60))
    assert not torch.equal(first, second)
    kept = torch.stack([first, second]).double()
    assert abs(float(kept.mean()) - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5
    assert float((kept.mean((0, 1, 3, 4)) - 0.7).abs().max()) < 5 * (0.21 / kept[:, :, 0].numel()) ** 0.5


@pytest.mark.parametrize("scores", (200, 1 << 24))
@pytest.mark.parametrize("mask", (FULL, CAUSAL, sliding(3)), ids=("full", "causal", "sliding"))
def test_dropout_is_the_same_in_both_passes_and_leaves_lse_alone(mask, scores, monkeypatch):
    monkeypatch.setattr(document, "BLOCK_SCORES", scores)
    tensors = inputs()
    options = Options("BNSD", mask, dropout_p=0.4)
    hidden = hidden_by_band(7, 7, mask.before, mask.after)
    torch.manual_seed(3)
    kept = kept_weights(options, (2, 4, 7), 7).double()
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    wanted = attention_formula(*leaves, hidden, 8**-0.5, kept, keep_prob=0.6)
    own = [x.clone().requires_grad_() for x in tensors[:3]]
    torch.manual_seed(3)
    found = attention(*own, options)
    for one, other in zip(found, wanted, strict=True):
        close(one, other)
    for one, other in zip(
        torch.autograd.grad(found, own, tensors[3:]), torch.autograd.grad(wanted, leaves, tensors[3:]), strict=True
    ):
        close(one, other)


def test_a_long_sequence_never_has_all_its_scores():
    """On the CPU too: what is allocated at once stays far below S x S."""
    length = 8192
    q = torch.zeros(1, 1, length, 8, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else [result]:
                largest = max(largest, x.untyped_storage().nbytes() if isinstance(x, torch.Tensor) else 0)
            return result

    with Watch():
        for mask in (CAUSAL, sliding(64)):
            out, _ = attention(q, q, q, Options("BNSD", mask))
            out.sum().backward()
    assert 0 < largest <= 4 * document.BLOCK_SCORES < length * length * 4


@pytest.mark.parametrize(
    ("make", "said"),
    (
        (lambda: Options("BSH"), "BNSD, BSND, SBH, TND"),
        (lambda: Options("TND"), "TND, and only TND"),
        (lambda: Options("SBH"), "SBH, and only SBH"),
        (lambda: Options(dropout_p=1.0), "from 0 to below 1"),
        (lambda: Mask(before=1, after=-2), "holds no key"),
        (lambda: Mask(dense=torch.zeros(2, 2)), "boolean"),
        (lambda: replace(CAUSAL, dense=torch.zeros(2, 2).bool()), "stands alone"),
        (lambda: CAUSAL.packed([3, 2]), "do not fall"),
        (lambda: CAUSAL.packed([3], [2, 3]), "must be as many"),
        (lambda: sliding(0), "at least 1"),
        (lambda: attention(*inputs((3, 2))[:3], Options("BNSD")), "3 heads of the query cannot share 2"),
        (lambda: attention(*inputs(keys=5)[:2], inputs()[2], Options("BNSD")), "must agree"),
        (
            lambda: attention(*(laid_out(x, "TND") for x in inputs()[:3]), Options("TND", CAUSAL.packed([3]))),
            "end at 3",
        ),
        (lambda: attention(*(laid_out(x, "SBH") for x in inputs()[:3]), Options("SBH", heads=3)), "3 heads"),
        (lambda: attention(*(x[0] for x in inputs()[:3]), Options("BNSD")), "number of dims"),
        (lambda: attention(*inputs()[:2], inputs()[2].float(), Options("BNSD")), "one dtype"),
        (
            lambda: attention(*inputs()[:3], Options("BNSD", Mask(dense=torch.zeros(7, 6).bool()))),
            "does not fit scores",
        ),
    ),
)
def test_what_does_not_go_together_is_said(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "TND"])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.5, False), (None, True), (0.5, True)])
def test_soft_caps_and_sinks(layout, softcap, has_sinks):
    q, k, v, dout, _ = inputs(batch=1)
    sinks = numbers(4, seed=9).requires_grad_() if has_sinks else None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bnid,bnjd->bnij", leaves[0], leaves[1].repeat_interleave(2, 1)) * q.shape[3] ** -0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden_by_band(7, 7, after=0), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(1, 4, 7, 1)], -1)
    out = torch.einsum("bnij,bnjd->bnid", scores.softmax(-1)[..., :7], leaves[2].repeat_interleave(2, 1))
    every = leaves if sinks is None else [*leaves, sinks]
    wanted = torch.autograd.grad(out, every, dout)
    mine = [laid_out(x, layout).requires_grad_() for x in (q, k, v)]
    mask = CAUSAL.packed((7,)) if layout == "TND" else CAUSAL
    found, lse = attention(*mine, Options(layout, mask, softcap=softcap, sinks=sinks))
    close(heads_first(found, layout, 4), out)
    close(lse.T[None] if layout == "TND" else lse, scores.logsumexp(-1))
    gradients = torch.autograd.grad(found, mine if sinks is None else [*mine, sinks], laid_out(dout, layout))
    for one, other, heads in zip(gradients, wanted, (4, 2, 2, 0), strict=False):
        close(one if one.dim() == 1 else heads_first(one, layout, heads), other)


def test_sinks_that_are_not_those_of_the_heads_are_refused():
    q, k, v, *_ = inputs()
    with pytest.raises(ValueError, match="sinks"):
        attention(q, k, v, Options("BNSD", sinks=numbers(3, seed=1)))
    with pytest.raises(ValueError, match="softcap"):
        Options("BNSD", softcap=0.0)
