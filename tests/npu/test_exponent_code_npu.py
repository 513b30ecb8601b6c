"""The lossless code with torch_npu's operators: any bits come back, and what CANN does not take is an error."""

import pytest
import shortages
import torch
import torch_npu
from refused_calls import outcomes

from ds_npu.ops import exponent_code
from ds_npu.ops.exponent_code import LEAST, CodeLayout

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Each of the 65,536 values of two bytes, in no order; of float32 as many random bit patterns. As bytes."""
    if dtype.itemsize == 4:
        return torch.randint(0, 256, (65536 * 4,)).to(torch.uint8)
    both = torch.randperm(65536)
    return torch.stack([both % 256, both // 256], 1).to(torch.uint8).view(-1)


def through(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """The bytes of numbers of ``dtype``, coded and decoded; how many highest bytes were not in the code."""
    numbers = x.npu().view(dtype)
    layout = CodeLayout(numbers.numel(), dtype)
    code = torch.full((layout.size,), 0x5A, dtype=torch.uint8, device="npu")
    overflow = exponent_code.overflow_memory(layout.overflow, numbers.device)
    # What is written there shows in what comes back without it.
    found, without = torch.empty_like(x, device="npu"), torch.empty_like(x, device="npu")
    exponent_code.encode(numbers, layout, code, overflow)
    exponent_code.decode(found.view(dtype), layout, code, overflow)
    other = torch.full((layout.overflow,), 0xA5, dtype=torch.uint8, device="npu")
    exponent_code.decode(without.view(dtype), layout, code, other)
    highest = slice(dtype.itemsize - 1, None, dtype.itemsize)
    return found.cpu(), int((without != found).cpu()[highest].sum())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_bits_come_back(dtype):
    torch.manual_seed(1)
    values = all_values(dtype)
    normal = torch.randn(8 * LEAST).to(dtype)
    cases = {
        "all": values,
        "equal": torch.zeros(LEAST * dtype.itemsize, dtype=torch.uint8),
        "normal": normal.view(torch.uint8),
        "normal and all": torch.cat([normal.view(torch.uint8), values, values]),
        "large": torch.cat([torch.randn(64 * LEAST + 64).to(dtype).view(torch.uint8), *[values] * 32]),
    }
    for name, x in cases.items():
        found, overflow = through(x, dtype)
        assert torch.equal(found, x), name
        if name == "all" and dtype != torch.float16:
            assert overflow > 0
        if name in ("equal", "normal") and dtype != torch.float16:
            assert overflow == 0


def test_sizes_at_the_limit_of_the_smallest_numbers_of_them():
    for groups in (512, 513, 1023, 1024, 1025):
        x = torch.randint(0, 256, (groups * 128,)).to(torch.uint8)
        assert torch.equal(through(x, torch.bfloat16)[0], x), groups


def test_counts_of_before_may_be_used():
    """With statistic false the values are ranked by the counts that are given, and come back all the same."""
    x = torch.randn(2 * LEAST).bfloat16().npu()
    layout = CodeLayout(x.numel(), x.dtype)
    code = torch.zeros(layout.size, dtype=torch.uint8, device="npu")
    counts, fixed, mantissa = layout.parts(code)
    overflow = torch.empty(layout.overflow // 2, dtype=torch.bfloat16, device="npu")
    counts.copy_(torch.randint(0, 9, (1, 256)))
    before = counts.clone()
    torch_npu.npu_hans_encode(x, False, False, out=(counts, mantissa, fixed, overflow))
    found = torch_npu.npu_hans_decode(mantissa, fixed, overflow, counts, False, out=torch.empty_like(x))
    assert torch.equal(counts, before) and torch.equal(found.cpu(), x.cpu())


def test_the_check_passes_and_a_host_without_memory_is_an_error():
    assert exponent_code.why_no_codes() is None
    exponent_code.why_wrong_codes.cache_clear()
    assert exponent_code.why_wrong_codes("npu") is None
    with (
        shortages.shortage(shortages.HOST, 1),
        pytest.raises(MemoryError, match=r"out of memory of the host: 4,096 bytes could not be pinned and mapped"),
    ):
        exponent_code.overflow_memory(4096, torch.device("npu:0"))


CALLS = {
    "encode(randn(32704), 8192, 99999)": "at least 32768",
    "encode(randn(32769), 8192, 99999)": "a multiple of 64",
    "encode(randn(32768), 128, 8000)": "fixed and var together",
    "encode(randn(32768), 100, 99999)": "at least 512 bytes",
    "encode(randn(32768).int(), 8192, 99999)": "float32, float16 or bfloat16",
    "encode(randn(32768), 8192, 99999, reshuff=True)": "reshuff",
    "mapped().add_(1)": "takes no tensor in host memory",
    "mapped().cpu()": "does not fit where its source",
}
"""Calls, each on a device of its own, and what the error says."""

PROGRAM = """
import sys
import torch, torch_npu

def randn(numel):
    return torch.randn(numel).npu()

def encode(x, fixed, var, reshuff=False):
    make = lambda numel: torch.empty(numel, dtype=x.dtype, device=x.device)
    out = torch.zeros(1, 256, dtype=torch.int32).npu(), make(x.numel() * 3 // 4), make(fixed), make(var)
    return torch_npu.npu_hans_encode(x, True, reshuff, out=out)[0]

def mapped():
    return torch_npu.empty_with_swapped_memory([64], dtype=torch.float32, device=f"npu:{torch.npu.current_device()}")

for device, call in enumerate(sys.argv[1:]):
    torch.npu.set_device(device)
    try:
        eval(call).cpu()
    except RuntimeError as error:
        print("an error", str(error).replace("\\n", " "))
    else:
        print("none")
"""


@pytest.fixture(scope="module")
def outcome():
    """Of each call the line that says whether it raised an error, and all that was said of the errors."""
    lines, said = outcomes(PROGRAM, list(CALLS))
    return lines, "\n".join([*lines.values(), said])


@pytest.mark.parametrize("call", CALLS)
def test_what_cann_does_not_take_is_an_error(call, outcome):
    lines, said = outcome
    assert lines[call].startswith("an error") and CALLS[call] in said
