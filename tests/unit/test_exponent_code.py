"""The lossless code of floating-point numbers: any bits come back, in the bytes that CANN's operators ask for."""

from __future__ import annotations

import pytest
import torch
from coded_activations import code_everything
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_npu.ops import exponent_code
from ds_npu.ops.exponent_code import LEAST, CodeLayout, code_layout

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Each of the 65,536 values of two bytes, in order; of float32 as many random bit patterns."""
    bits = torch.arange(65536) if dtype.itemsize == 2 else torch.randint(0, 2**32, (65536,))
    kind = torch.int16 if dtype.itemsize == 2 else torch.int32
    size = 2 ** (8 * dtype.itemsize)
    return torch.where(bits >= size // 2, bits - size, bits).to(kind).view(dtype)


def through(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``x`` coded and decoded, and how many bytes of the overflow were written; memory was full of other numbers."""
    layout = CodeLayout(x.numel(), x.dtype)
    code = torch.full((layout.size,), 0x5A, dtype=torch.uint8)
    overflow = torch.full((layout.overflow,), 0xA5, dtype=torch.uint8)
    exponent_code.encode(x, layout, code, overflow)
    out = torch.full_like(x, 3)
    exponent_code.decode(out, layout, code, overflow)
    written = (overflow != 0xA5).nonzero()
    return out, int(written.max()) + 1 if len(written) else 0


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("room", [None, 1 / 2, 1 / 16, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_bits_come_back(dtype, room, monkeypatch):
    if room is not None:
        code_everything(monkeypatch, room)
    torch.manual_seed(1)
    values = all_values(dtype)
    if dtype.itemsize == 2:
        assert len(bits(values).view(-1, 2).unique(dim=0)) == 65536
    shuffled = values[torch.randperm(65536)]
    normal = torch.randn(65536).to(dtype)
    overflows = {}
    for name, x in {
        "all, in no order": shuffled,
        "all, in order": values,
        "equal": torch.zeros(65536, dtype=dtype),
        "normal, then all": torch.cat([normal, shuffled]),
    }.items():
        found, overflows[name] = through(x)
        assert torch.equal(bits(found), bits(x)), name
    # Of what does not compress 64 bytes take 65.
    fixed = CodeLayout(65536, dtype).fixed
    assert overflows["all, in no order"] == max(0, 65536 - (fixed - 8) // 65 * 64)
    assert (overflows["all, in no order"] > 0) == (room != 2 and (room is not None or dtype != torch.float16))
    assert overflows["equal"] == 0


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(DTYPES), st.integers(512, 1100), st.integers(0, 255), st.integers(0, 2**31))
def test_numbers_of_few_and_many_values_come_back(dtype, groups, mask, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (groups * 64, dtype.itemsize), generator=generator).to(torch.uint8)
    x[: groups * 16] &= mask
    x = x.view(dtype).view(-1)
    assert torch.equal(bits(through(x)[0]), bits(x))


@settings(deadline=None)
@given(st.sampled_from(DTYPES), st.integers(512, 10**8), st.sampled_from((40, 48, 50, 64)))
def test_sizes_are_those_that_the_kernels_take(dtype, groups, cores):
    """Of torch_npu's documentation of npu_hans_encode: cores are all there are, or in CANN's code those at work."""
    numel = groups * 64
    layout = CodeLayout(numel, dtype)
    parts = layout.parts(torch.empty(layout.size, dtype=torch.uint8, device="meta"))
    counts, fixed, mantissa = parts
    assert counts.shape == (1, 256) and counts.dtype == torch.int32
    assert mantissa.numel() * mantissa.element_size() == numel * (dtype.itemsize - 1)
    assert fixed.dtype == mantissa.dtype == dtype
    assert fixed.nbytes >= 512
    assert fixed.nbytes + layout.overflow >= numel + numel // 64 + 8448 * cores + 512
    assert layout.overflow >= numel and layout.overflow % dtype.itemsize == 0
    assert all(each.storage_offset() * each.element_size() % 512 == 0 for each in parts)


def test_what_is_coded():
    mib = 2**20
    assert code_layout(torch.bfloat16, 64 * mib).size == pytest.approx(13 / 16 * 64 * mib, rel=0.01)
    assert code_layout(torch.float32, 64 * mib).size == pytest.approx(29 / 32 * 64 * mib, rel=0.01)
    assert code_layout(torch.float16, 64 * mib).size == pytest.approx(29 / 32 * 64 * mib, rel=0.01)
    for dtype in (torch.float64, torch.uint8, torch.int64, torch.bool, torch.complex64):
        assert code_layout(dtype, 64 * mib) is None
    assert code_layout(torch.bfloat16, 64 * mib + 2) is None, "not a multiple of 64 numbers"
    assert code_layout(torch.bfloat16, 64 * mib + 1) is None, "not a number of bytes"
    # The tails of the vector cores: a code of 1 MiB would be as large.
    assert code_layout(torch.bfloat16, mib) is None
    assert code_layout(torch.bfloat16, 2 * LEAST) is None
    assert code_layout(torch.bfloat16, 4 * mib).size < 15 / 16 * 4 * mib


def test_the_check_says_no():
    assert exponent_code.why_wrong_codes("cpu") is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exponent_code, "decode", lambda out, *_: out.zero_())
        exponent_code.why_wrong_codes.cache_clear()
        assert exponent_code.why_wrong_codes("cpu") == "torch.bfloat16 does not come back as it was"
    exponent_code.why_wrong_codes.cache_clear()
