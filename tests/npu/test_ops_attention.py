"""Attention's kernel, through torch_npu: as near to float64 as PyTorch's own, in every layout and with every mask."""

import itertools

import pytest
import torch
import torch_npu
from attention_formula import attention_formula, hidden_by_band, hidden_by_documents

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
    kernel_refusal,
    reference,
    sliding,
)
from ds_npu.ops.npu import attention as kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BANDS = {
    "full": FULL,
    "causal": CAUSAL,
    "sliding": sliding(9),
    "both ways": Mask(before=5, after=3),
    "from the start": Mask(after=0, from_start=True),
}
SCALE = 0.2
TOKENS = ("pre_tockens", "next_tockens")


def numbers(*shape, seed, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(dtype, heads=(4, 2), widths=(32, 32), rows=40, keys=40, batch=2):
    shapes = (
        (batch, heads[0], rows, widths[0]),
        (batch, heads[1], keys, widths[0]),
        (batch, heads[1], keys, widths[1]),
        (batch, heads[0], rows, widths[1]),
        (batch, heads[0], rows),
    )
    found = [numbers(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    return [*found[:4], found[4].float()]


def laid_out(x, layout):
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    return x.permute(2, 0, 1, 3).flatten(2) if layout == "SBH" else x[0].transpose(0, 1)


class Calls:
    """Counts torch_npu's attention and keeps what it was called with."""

    def __init__(self, monkeypatch):
        self.arguments = []
        for name in ("npu_fusion_attention", "npu_fusion_attention_grad"):
            monkeypatch.setattr(torch_npu, name, self.counted(getattr(torch_npu, name), name))

    def counted(self, function, name):
        def call(*args, **kwargs):
            self.arguments.append((name, args, kwargs))
            return function(*args, **kwargs)

        return call

    @property
    def names(self):
        return [name for name, *_ in self.arguments]


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


def outcome(function, tensors, dtype, with_dlse, device="cpu"):
    q, k, v, dout, dlse = tensors
    leaves = [x.to(device, dtype).requires_grad_() for x in (q, k, v)]
    out, lse = function(*leaves)
    upstream = [dout.to(device, dtype), dlse.to(device, lse.dtype)] if with_dlse else [dout.to(device, dtype)]
    gradients = torch.autograd.grad([out, lse] if with_dlse else [out], leaves, upstream)
    return [x.detach().cpu().double() for x in (out, lse, *gradients)]


def near(found, plain, exact):
    """Within twice the error (root mean square) that PyTorch's own computation in the same dtype has."""
    for name, one, other, true in zip(("out", "lse", "dq", "dk", "dv"), found, plain, exact, strict=True):
        one, other = (float(torch.where(true == x, 0, x - true).square().mean().sqrt()) for x in (one, other))
        assert one <= 2 * other, (name, one, other)


def check(tensors, hidden, options, with_dlse=True):
    """The kernel against the formula, both in the inputs' dtype, and against the formula in float64."""
    dtype, layout = tensors[0].dtype, options.layout
    scale = options.scale or tensors[0].shape[3] ** -0.5

    def by_formula(*x):
        return attention_formula(*x, hidden, scale)

    def by_kernel(q, k, v):
        heads_first = {
            "BNSD": lambda x: x,
            "BSND": lambda x: x.transpose(1, 2),
            "TND": lambda x: x.transpose(0, 1)[None],
        }
        out, lse = attention(*(laid_out(x, layout) for x in (q, k, v)), options)
        assert out.dtype == dtype and lse.dtype == torch.float32
        if layout == "SBH":
            return out.unflatten(2, (q.shape[1], -1)).permute(1, 2, 0, 3), lse
        return heads_first[layout](out), lse.T[None] if layout == "TND" else lse

    near(
        outcome(by_kernel, tensors, dtype, with_dlse, "npu"),
        outcome(by_formula, tensors, dtype, with_dlse),
        outcome(by_formula, tensors, torch.float64, with_dlse),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("layout", ("BNSD", "BSND", "SBH"))
def test_every_layout_and_band(layout, band, dtype, calls):
    mask = BANDS[band]
    for rows, keys in ((40, 40), (24, 40)):
        hidden = hidden_by_band(rows, keys, mask.before, mask.after, mask.from_start)
        options = Options(layout, mask, SCALE, heads=4 if layout == "SBH" else 0)
        check(inputs(dtype, rows=rows, keys=keys), hidden, options, with_dlse=False)
    assert calls.names == ["npu_fusion_attention", "npu_fusion_attention_grad"] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", ((4, 4), (4, 1)))
@pytest.mark.parametrize("widths", ((32, 32), (48, 32)))
@pytest.mark.parametrize("layout", ("BNSD", "BSND", "SBH"))
def test_a_gradient_of_lse_and_values_of_another_width(layout, widths, heads, dtype, calls):
    options = Options(layout, CAUSAL, heads=4 if layout == "SBH" else 0)
    check(inputs(dtype, heads, widths), hidden_by_band(40, 40, after=0), options)
    assert calls.names == ["npu_fusion_attention", "npu_fusion_attention_grad"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("with_dlse", (False, True))
def test_packed_documents(band, dtype, with_dlse, calls):
    mask = BANDS[band]
    ends = tuple(itertools.accumulate((5, 0, 33, 2)))
    hidden = hidden_by_documents(ends, ends, before=mask.before, after=mask.after, from_start=mask.from_start)
    tensors = inputs(dtype, rows=40, keys=40, batch=1, widths=(32, 16))
    check(tensors, hidden, Options("TND", mask.packed(ends), SCALE), with_dlse)
    assert calls.names == ["npu_fusion_attention", "npu_fusion_attention_grad"]
    assert calls.arguments[0][2]["actual_seq_qlen"] == [5, 38, 40]


@pytest.mark.parametrize("mask", (CAUSAL, Mask(after=0, from_start=True), sliding(4)), ids=("end", "start", "sliding"))
def test_packed_documents_with_more_keys_than_rows(mask, calls):
    ends_q, ends_k = (4, 13, 30), (9, 18, 40)
    hidden = hidden_by_documents(ends_q, ends_k, before=mask.before, after=mask.after, from_start=mask.from_start)
    tensors = inputs(torch.bfloat16, rows=30, keys=40, batch=1)
    check(tensors, hidden, Options("TND", mask.packed(ends_q, ends_k), SCALE))
    assert calls.names == ["npu_fusion_attention", "npu_fusion_attention_grad"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((40, 40), (2, 1, 40, 40), (1, 4, 40, 40), (2, 4, 40, 40), (2, 1, 1, 40)))
def test_a_dense_mask_may_empty_a_row(shape, dtype, calls):
    dense = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    dense[..., -1, :] |= dense.shape[-2] > 1
    check(inputs(dtype), dense.expand(2, 4, 40, 40), Options("BSND", Mask(dense=dense.npu()), SCALE))
    assert calls.names == ["npu_fusion_attention", "npu_fusion_attention_grad"]


def test_rows_without_a_key_are_zero():
    q, k, v, dout, _ = (x.npu() for x in inputs(torch.bfloat16, rows=40, keys=24))
    result = attention_forward(q, k, v, Options("BNSD", CAUSAL))
    assert not result.out[:, :, :16].cpu().any() and bool((result.lse[:, :, :16] == -torch.inf).cpu().all())
    assert bool(result.lse[:, :, 16:].isfinite().cpu().all())
    found = attention_backward(dout, Inputs(q, k, v), result, Options("BNSD", CAUSAL))
    assert not found.q[:, :, :16].cpu().any() and all(bool(x.isfinite().cpu().all()) for x in found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_from_a_merged_lse(dtype):
    """Ring attention's two halves of the keys, each with a backward pass from the merged (out, lse)."""
    q, k, v, dout, _ = (x.npu() for x in inputs(dtype))
    parts = [Inputs(q, k[:, :, at], v[:, :, at]) for at in (slice(0, 16), slice(16, 40))]
    options = Options("BNSD", FULL, SCALE)
    results = [attention_forward(*part, options) for part in parts]
    lse = torch.logaddexp(results[0].lse, results[1].lse)
    out = sum(one.out.float() * (one.lse - lse).exp()[..., None] for one in results)
    one, other = (attention_backward(dout, part, Result(out, lse), options) for part in parts)
    joined = (one.q.float() + other.q.float(), torch.cat([one.k, other.k], 2), torch.cat([one.v, other.v], 2))
    found = [x.cpu().double() for x in (out, lse, *joined)]

    def by_formula(*x):
        return attention_formula(*x, torch.zeros(40, 40).bool(), SCALE)

    tensors = inputs(dtype)
    plain, exact = (outcome(by_formula, tensors, each, False) for each in (dtype, torch.float64))
    near(found, plain, exact)


def test_dropout_is_the_same_in_both_passes():
    q, k, dout = (numbers(2, 4, 40, 32, seed=i, dtype=torch.float32) for i in range(3))
    v = torch.eye(40, 32).expand(2, 4, 40, 32)
    options = Options("BNSD", FULL, SCALE, dropout_p=0.3)
    on = [x.npu().requires_grad_() for x in (q, k, v)]
    torch.npu.manual_seed(3)
    out, _ = attention(*on, options)
    again, _ = attention(*on, options)
    # The identity shows which weights were kept, but for the keys beyond v's width, whose v is 0.
    kept = torch.ones(2, 4, 40, 40)
    kept[..., :32] = (out != 0).cpu()
    assert 0.6 < float(kept[..., :32].mean()) < 0.8 and not torch.equal(out.cpu(), again.cpu())
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wanted, _ = attention_formula(*leaves, torch.zeros(40, 40).bool(), SCALE, kept, keep_prob=0.7)
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-5, atol=1e-6)
    # Only dq and dk of the first 32 keys: the pattern beyond them is not known, and v is 0 there.
    found = torch.autograd.grad(out, on[:2], dout.npu())
    for one, other in zip(found, torch.autograd.grad(wanted, leaves[:2], dout.double()), strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-4, atol=1e-5)


def test_lse_has_no_gradient_with_dropout():
    q, k, v, *_ = (x.npu().requires_grad_() for x in inputs(torch.bfloat16))
    _, lse = attention(q, k, v, Options("BNSD", dropout_p=0.1))
    with pytest.raises(NotImplementedError, match="with dropout"):
        lse.sum().backward()


def wide(width, value_width=None, heads=(4, 2)):
    return [
        x.npu() for x in inputs(torch.bfloat16, heads=heads, widths=(width, value_width or width), rows=8, keys=8)[:3]
    ]


@pytest.mark.parametrize(
    ("make", "options", "said"),
    (
        (lambda: wide(776), Options("BNSD", CAUSAL), "width 776"),
        (lambda: wide(16, 24), Options("BNSD", CAUSAL), "wider than the keys"),
        (lambda: wide(8, heads=(260, 260)), Options("BNSD", CAUSAL), "260 heads"),
        (lambda: [x[0] for x in wide(8, heads=(8, 8))], Options("TND", CAUSAL.packed((4, 8), (6, 8))), "sees none"),
    ),
)
def test_what_the_kernel_cannot_do_the_reference_does(make, options, said, calls):
    q, k, v = make()
    assert said in kernel_refusal(q, k, v, options)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = attention(*leaves, options)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert calls.names == []
    wanted = reference.forward(*(x.detach().cpu() for x in (q, k, v)), options)
    torch.testing.assert_close(out.detach().cpu(), wanted.out, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("mask", "sparse"),
    (
        (FULL, None),
        (Mask(before=39, after=23), None),
        (CAUSAL, (3, None, None)),
        (Mask(before=100, after=0), (3, None, None)),
        (Mask(after=0, from_start=True), (2, None, None)),
        (Mask(after=-16), (2, None, None)),
        (sliding(9), (4, 8, 0)),
        (Mask(before=8, after=2, from_start=True), (4, 24, -14)),
        (Mask(dense=torch.zeros(24, 40).bool()), (1, None, None)),
    ),
    ids=str,
)
def test_the_sparse_mode_of_24_rows_and_40_keys(mask, sparse, calls):
    """The simplest way to say it: causal rather than a band, nothing where nothing is hidden."""
    if mask.dense is not None:
        mask = Mask(dense=mask.dense.npu())
    q, k, v, *_ = (x.npu() for x in inputs(torch.bfloat16, rows=24))
    attention(q, k, v, Options("BNSD", mask))
    options = calls.arguments[0][2]
    if sparse is None:
        assert "atten_mask" not in options and "sparse_mode" not in options
    else:
        ends = [None if options.get(name, 2**31 - 1) == 2**31 - 1 else options[name] for name in TOKENS]
        assert (options["sparse_mode"], *ends) == sparse


def test_packed_documents_of_an_old_torch_npu_are_the_references(calls, monkeypatch):
    assert kernel._tells_layout()
    monkeypatch.setattr(kernel, "_tells_layout", lambda: False)
    ends = (5, 40)
    hidden = hidden_by_documents(ends, ends, after=0)
    check(inputs(torch.float32, batch=1), hidden, Options("TND", CAUSAL.packed(ends), SCALE))
    assert calls.names == []


@pytest.mark.parametrize("operator", (attention_forward, attention_backward), ids=("forward", "backward"))
def test_the_self_check_passes(operator):
    assert operator.check(torch.device("npu", 0)) is None


@pytest.mark.parametrize(
    "mask", (CAUSAL, sliding(4096), CAUSAL.packed((1000, 65536))), ids=("causal", "sliding", "packed")
)
def test_a_long_sequence_gets_no_mask_but_the_compressed_one(mask, monkeypatch):
    """The arguments of both passes for 64k tokens: the only mask is [2048, 2048], the same tensor each time."""
    length, seen = 65536, []

    def forward(q, k, v, heads, layout, **options):
        seen.append(options)
        statistics = torch.ones(*((length, heads) if layout == "TND" else (1, heads, length)), 8, device="npu")
        return torch.zeros_like(q), statistics, statistics, None, 0, 0, 0

    def backward(q, k, v, dout, heads, layout, **options):
        seen.append(options)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None

    monkeypatch.setattr(torch_npu, "npu_fusion_attention", forward)
    monkeypatch.setattr(torch_npu, "npu_fusion_attention_grad", backward)
    layout = "TND" if mask.ends_q else "BSND"
    shape = (length, 1, 8) if layout == "TND" else (1, length, 1, 8)
    kernel._compressed(torch.device("npu", 0))
    torch.npu.synchronize()
    x = torch.zeros(*shape, dtype=torch.bfloat16, device="npu", requires_grad=True)
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    for _ in range(2):
        out, _ = attention(x, x, x, Options(layout, mask))
        out.sum().backward()
    assert len(seen) == 4 and len({id(options["atten_mask"]) for options in seen}) == 1
    assert seen[0]["atten_mask"].shape == (2048, 2048)
    assert torch.npu.max_memory_allocated() - before < 40 * x.numel() * 2
    assert 40 * x.numel() * 2 < length * length / 50
