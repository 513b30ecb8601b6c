"""npu_fusion_attention and its gradients agree with attention in float64, whatever the layout, mode and heads."""

from dataclasses import dataclass

import pytest
import torch
import torch_npu
from agreement import FLOATING, Layout, agree, layouts, numbers, on_npu, rounded
from attention_reference import Attention, attention, compressed_mask, hidden_in_mode
from hypothesis import example, given, settings
from hypothesis import strategies as st

UNLIMITED = 2**31 - 1
LENGTHS = (1, 2, 7, 33, 64, 130)


@dataclass(frozen=True)
class Case:
    """Sizes and layout of one call. ``mode`` is CANN's sparse mode, None for no mask."""

    layout: str = "BNSD"
    batch: int = 1
    key_heads: int = 1
    group: int = 1
    rows: int = 7
    keys: int = 7
    size: int = 16
    value_size: int = 16
    dtype: torch.dtype = torch.float32
    mode: int | None = None
    pre: int = UNLIMITED
    post: int = UNLIMITED
    strided: tuple[Layout | None, ...] = (None, None, None)

    @property
    def heads(self) -> int:
        return self.key_heads * self.group

    @property
    def scale(self) -> float:
        return self.size**-0.5


@st.composite
def cases(draw, modes=(None, 0, 1, 2, 3, 4)):
    layout = draw(st.sampled_from(("BNSD", "BSND", "BSH", "SBH")))
    rows, keys = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(LENGTHS))
    mode = draw(st.sampled_from(modes))
    pre, post = UNLIMITED, UNLIMITED
    if mode in (0, 4):
        pre = draw(st.integers(min_value=0, max_value=rows + 3))
        post = draw(st.integers(min_value=0, max_value=keys + 3))
    size = draw(st.sampled_from((8, 16, 48)))
    return Case(
        layout,
        draw(st.integers(min_value=1, max_value=2)),
        draw(st.integers(min_value=1, max_value=2)),
        draw(st.integers(min_value=1, max_value=3)),
        rows,
        keys,
        size,
        draw(st.sampled_from((size, size // 2))),
        draw(st.sampled_from(FLOATING)),
        mode,
        pre,
        post,
        tuple(draw(layouts(4 if layout in ("BNSD", "BSND") else 3)) for _ in range(3)),
    )


def laid_out(value: torch.Tensor, layout: str) -> torch.Tensor:
    """[batch, heads, rows, size] in the given layout's order of dims."""
    if layout == "BNSD":
        return value
    if layout == "BSND":
        return value.transpose(1, 2)
    if layout == "BSH":
        return value.transpose(1, 2).flatten(2)
    return value.permute(2, 0, 1, 3).flatten(2)


def inputs(case: Case, seed: int):
    shapes = (
        (case.batch, case.heads, case.rows, case.size),
        (case.batch, case.key_heads, case.keys, case.size),
        (case.batch, case.key_heads, case.keys, case.value_size),
        (case.batch, case.heads, case.rows, case.value_size),
    )
    return [numbers(*shape, seed=seed + i, dtype=case.dtype) for i, shape in enumerate(shapes)]


def run(case: Case, seed: int, atten_mask: torch.Tensor | None, **options):
    """The four outputs of interest on the NPU: out, max, sum and gradients by name."""
    query, key, value, upstream = (laid_out(tensor, case.layout) for tensor in inputs(case, seed))
    on = [on_npu(t, case.dtype, s).requires_grad_() for t, s in zip((query, key, value), case.strided, strict=True)]
    named = dict(zip(("query", "key", "value"), on, strict=True))
    named |= {name: options[name] for name in ("pse", "sink") if name in options}
    fused = torch_npu.npu_fusion_attention
    if "pse_type" in options:
        fused = torch_npu.npu_fusion_attention_v2
        tokens = {"pre_tokens": case.pre, "next_tokens": case.post}
    else:
        tokens = {"pre_tockens": case.pre, "next_tockens": case.post}
    mask = None if atten_mask is None else atten_mask.npu()
    options = {"scale": case.scale, "sparse_mode": case.mode or 0, "atten_mask": mask, **tokens, **options}
    out, maximum, total, *_ = fused(*on, case.heads, case.layout, **options)
    gradients = torch.autograd.grad(out, list(named.values()), on_npu(upstream, case.dtype))
    return out, maximum, total, dict(zip(named, gradients, strict=True))


def expected(case: Case, seed: int, hidden: torch.Tensor, **options) -> Attention:
    return attention(*inputs(case, seed), hidden, scale=case.scale, dtype=case.dtype, **options)


def check(case: Case, found, reference: Attention) -> None:
    out, maximum, total, gradients = found
    magnitudes = reference.magnitudes
    agree(out, laid_out(reference.out, case.layout), laid_out(magnitudes["out"], case.layout))
    eight = (*reference.max.shape, 8)
    agree(maximum, reference.max[..., None].expand(eight), magnitudes["max"][..., None].expand(eight))
    agree(total, reference.sum[..., None].expand(eight), magnitudes["sum"].expand(eight))
    for name, gradient in gradients.items():
        wanted, magnitude = reference.gradients[name], magnitudes[name]
        if name in ("query", "key", "value"):
            wanted, magnitude = laid_out(wanted, case.layout), laid_out(magnitude, case.layout)
        agree(gradient, wanted, magnitude)


def window_of(case: Case) -> torch.Tensor:
    if case.mode in (None, 1):
        return torch.zeros(case.rows, case.keys, dtype=torch.bool)
    return hidden_in_mode(case.mode, case.rows, case.keys, case.pre, case.post)


def scattered(case: Case, seed: int, batches: int, heads: int) -> torch.Tensor:
    """Further keys hidden at random, [batches, heads, rows, keys]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batches, heads, case.rows, case.keys, generator=generator) < 0.2


@settings(max_examples=60)
@given(cases(modes=(None, 2, 3, 4)), st.integers(0, 1000))
@example(Case(rows=700, keys=530, mode=3), 1)
@example(Case(layout="BSND", rows=100, keys=1100, mode=4, pre=300, post=20, key_heads=2), 2)
@example(Case(layout="SBH", rows=530, keys=700, mode=2, size=192, value_size=128, dtype=torch.bfloat16), 3)
@example(Case(rows=300, keys=100, mode=4, pre=10, post=10), 4)
@example(Case(rows=1, keys=600, mode=3, group=4), 5)
def test_attention_in_the_compressed_modes_agrees_with_float64(case, seed):
    mask = None if case.mode is None else compressed_mask()
    if case.mode == 4 and case.post + (case.keys - case.rows) < 0:
        case = Case(**{**vars(case), "post": case.rows})  # CANN wants a key for the band
    check(case, run(case, seed, mask), expected(case, seed, window_of(case)))


@settings(max_examples=40)
@given(
    cases(modes=(0, 1)),
    st.integers(0, 1000),
    st.sampled_from(("SS", "11SS", "B1SS", "BNSS")),
    st.sampled_from((torch.bool, torch.uint8)),
)
def test_attention_with_a_whole_mask_agrees_with_float64(case, seed, shape, mask_dtype):
    batches, heads = case.batch if "B" in shape else 1, case.heads if "N" in shape else 1
    hidden = window_of(case) | scattered(case, seed, batches, heads)
    mask = (hidden[0, 0] if shape == "SS" else hidden).to(mask_dtype)
    check(case, run(case, seed, mask, inner_precise=2), expected(case, seed, hidden))


def test_a_row_that_the_mask_hides_weighs_all_keys_the_same_unless_inner_precise_is_2():
    case = Case(rows=5, keys=9, mode=1, group=2, dtype=torch.bfloat16)
    hidden = torch.zeros(5, 9, dtype=torch.bool)
    hidden[2] = True
    check(case, run(case, 3, hidden), expected(case, 3, hidden, hidden_row_weights="equal"))
    check(case, run(case, 3, hidden, inner_precise=2), expected(case, 3, hidden))


@settings(max_examples=20)
@given(cases(modes=(5, 6)), st.data(), st.integers(0, 1000))
def test_attention_with_a_prefix_agrees_with_float64(case, data, seed):
    least = max(case.keys - case.rows, 0)
    prefix = [data.draw(st.integers(least, case.keys)) for _ in range(case.batch)]
    hidden = torch.stack([hidden_in_mode(case.mode, case.rows, case.keys, prefix=one) for one in prefix])[:, None]
    mask = compressed_mask(3072) if case.mode == 6 else hidden
    check(case, run(case, seed, mask, prefix=prefix, inner_precise=2), expected(case, seed, hidden))


@settings(max_examples=30)
@given(
    cases(modes=(None, 3)), st.sampled_from(("BNSS", "BN1S", "1NSS")), st.sampled_from((None, 0, 1)), st.integers(0, 99)
)
def test_the_position_shift_and_its_gradient_agree_with_float64(case, shape, kind, seed):
    sizes = (1 if shape[0] == "1" else case.batch, case.heads, 1 if shape[2] == "1" else case.rows, case.keys)
    pse = numbers(*sizes, seed=seed + 9, dtype=case.dtype)
    options = {"pse": pse.to(case.dtype).npu().requires_grad_()} | ({} if kind is None else {"pse_type": kind})
    found = run(case, seed, None if case.mode is None else compressed_mask(), **options)
    check(case, found, expected(case, seed, window_of(case), pse=pse, pse_type=1 if kind is None else kind))


@settings(max_examples=30)
@given(cases(modes=(None, 3, 4)), st.integers(0, 99))
def test_a_sink_takes_weight_from_every_row_and_gets_its_gradient(case, seed):
    if case.mode == 4 and case.post + (case.keys - case.rows) < 0:
        case = Case(**{**vars(case), "post": case.rows})
    sink = rounded(numbers(case.heads, seed=seed + 7), torch.float32)
    mask = None if case.mode is None else compressed_mask()
    found = run(case, seed, mask, sink=sink.float().npu().requires_grad_())
    check(case, found, expected(case, seed, window_of(case), sink=sink))


@pytest.mark.parametrize("layout", ("BNSD", "BSH"))
def test_no_rows_and_no_keys_are_allowed(layout):
    for rows, keys in ((0, 5), (5, 0)):
        case = Case(layout=layout, rows=rows, keys=keys)
        out, maximum, total, gradients = run(case, 1, None)
        for tensor in (out, maximum, total, *gradients.values()):
            assert not tensor.cpu().any()
