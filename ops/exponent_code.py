"""A lossless code of floating-point numbers, for which the byte of sign and exponent takes fewer bits.

The highest byte of a number (sign and seven bits of the exponent; in float16 sign, exponent and two bits more) has few
values in most tensors. The code replaces it by its index among the values by frequency, written with as many bits as 64
neighbours need. The other bytes, the mantissa, are kept as they are. Any bit pattern comes back.

The size of the code is known before the numbers are: ``CodeLayout``. Bytes that do not fit go, as they are, into an
overflow of one byte for each number, so that every number fits. On NPUs these are CANN's HansEncode and HansDecode
(their bytes are CANN's own); elsewhere a formula in plain PyTorch with bytes of its own. Source: aclnnHansEncode.md and
hans_encode_tiling.cpp in cann/ops-math.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ds_npu import capability
from ds_npu.capability import Unavailable
from ds_npu.ops.operator import npu_kernels

KERNELS = ("npu_hans_encode", "npu_hans_decode", "empty_with_swapped_memory")
GROUP = 64
"""Numbers whose indices have one width."""
LEAST = 32768
"""Fewest numbers that the kernels take; a multiple of GROUP."""
CODE_RATIO: dict[torch.dtype, float] = {torch.bfloat16: 5 / 8, torch.float32: 5 / 8, torch.float16: 13 / 16}
"""Bytes of code for each highest byte, a 32nd of which tells the widths."""
MOST_SHARE = 15 / 16
"""Largest code as a share of the storage's bytes; what gains less is not coded."""
HEADER, CORE_TAIL = 512, 8448 + 256
"""Bytes that the kernels add once, and for each vector core."""
CORES, MOST_CORES = 48, 64
"""Vector cores of an Atlas A2 or A3; the kernels check sizes with their own number, at most MOST_CORES."""
COUNTS = 256 * 4
ALIGNMENT = 512


@dataclass(frozen=True)
class CodeLayout:
    """The parts of the code of ``numel`` numbers of ``dtype``, in this order: counts, fixed, mantissa."""

    numel: int
    dtype: torch.dtype

    @functools.cached_property
    def fixed(self) -> int:
        """Bytes of the coded highest bytes."""
        cores = min(max(self.numel // LEAST, 1), CORES)
        return -(-(HEADER + CORE_TAIL * cores + int(self.numel * CODE_RATIO[self.dtype])) // ALIGNMENT) * ALIGNMENT

    @property
    def mantissa(self) -> int:
        """Number of all other bytes."""
        return self.numel * (self.dtype.itemsize - 1)

    @property
    def size(self) -> int:
        """Bytes of the code without its overflow."""
        return COUNTS + self.fixed + self.mantissa

    @functools.cached_property
    def overflow(self) -> int:
        """Bytes of the overflow: all highest bytes, and what the kernels ask for on top of ``fixed``."""
        asked = self.numel + self.numel // GROUP + CORE_TAIL * MOST_CORES + HEADER - self.fixed
        return -(-max(self.numel, asked) // ALIGNMENT) * ALIGNMENT

    def parts(self, code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of ``code`` [size] uint8: counts [1, 256] int32, fixed and mantissa of ``dtype``."""
        counts = code[:COUNTS].view(torch.int32)
        numbers = code[COUNTS : self.size].view(self.dtype)
        first = self.fixed // self.dtype.itemsize
        return counts.view(1, 256), numbers[:first], numbers[first:]


def code_layout(dtype: torch.dtype, nbytes: int) -> CodeLayout | None:
    """The layout for ``nbytes`` bytes of ``dtype``; None where they cannot be coded, or too little is gained."""
    numel = nbytes // dtype.itemsize
    if dtype not in CODE_RATIO or numel * dtype.itemsize != nbytes or numel % GROUP or numel < LEAST:
        return None
    layout = CodeLayout(numel, dtype)
    return layout if layout.size <= MOST_SHARE * nbytes else None


def overflow_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """[nbytes] uint8 for overflows: on NPUs host memory that only the two kernels may use; raises MemoryError."""
    if device.type != "npu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    made: torch.Tensor = npu_kernels("ds_npu.ops.npu.exponent_code").mapped_memory(nbytes, device)
    return made


def encode(x: torch.Tensor, layout: CodeLayout, code: torch.Tensor, overflow: torch.Tensor) -> None:
    """Write the code of ``x`` [numel] into ``code`` [layout.size] and ``overflow`` [>= layout.overflow], both uint8."""
    on_npu = x.device.type == "npu"
    write = npu_kernels("ds_npu.ops.npu.exponent_code").hans_encode if on_npu else _encode
    write(x, *layout.parts(code), overflow[: layout.overflow].view(layout.dtype))


def decode(out: torch.Tensor, layout: CodeLayout, code: torch.Tensor, overflow: torch.Tensor) -> None:
    """Write into ``out`` [numel] the numbers whose code is ``code`` and ``overflow``."""
    on_npu = out.device.type == "npu"
    read = npu_kernels("ds_npu.ops.npu.exponent_code").hans_decode if on_npu else _decode
    read(out, *layout.parts(code), overflow[: layout.overflow].view(layout.dtype))


def why_no_codes() -> Unavailable | None:
    """Why NPUs of this machine have no such code; None if they have. Imports torch_npu, and asks for no device."""
    return capability.torch_npu_importable() or capability.missing_functions(KERNELS)


@functools.cache
def why_wrong_codes(device: str) -> str | None:
    """Why ``device`` does not give back random bits and equal numbers; None if it does. Waits for the device."""
    for dtype in CODE_RATIO:
        layout = CodeLayout(2 * LEAST, dtype)
        generator = torch.Generator().manual_seed(1)
        x = torch.randint(
            0, 256, (layout.numel * dtype.itemsize,), dtype=torch.uint8, generator=generator, device="cpu"
        )
        x[: len(x) // 2] &= 3
        try:
            on_device = x.to(device)
            code = torch.empty(layout.size, dtype=torch.uint8, device=device)
            out = torch.empty_like(on_device)
            overflow = overflow_memory(layout.overflow, on_device.device)
            encode(on_device.view(dtype), layout, code, overflow)
            decode(out.view(dtype), layout, code, overflow)
            if not torch.equal(out.cpu(), x):
                return f"{dtype} does not come back as it was"
        except RuntimeError as error:
            return f"in {dtype} it raises {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


# ---- the formula: a byte for each group's width, then the bits of its indices, a plane of 64 bits at a time ----

_BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device="cpu")


def _encode(
    x: torch.Tensor, counts: torch.Tensor, fixed: torch.Tensor, mantissa: torch.Tensor, overflow: torch.Tensor
) -> None:
    numbers = x.view(torch.uint8).view(-1, x.element_size())
    mantissa.view(torch.uint8).copy_(numbers[:, :-1].reshape(-1))
    highest = numbers[:, -1].contiguous()
    counts.copy_(torch.bincount(highest, minlength=256))
    indices = _by_frequency(counts).argsort().to(torch.uint8)[highest.long()].view(-1, GROUP)
    widths = (indices.amax(1, keepdim=True) >= _BITS).sum(1).to(torch.uint8)
    stored = fixed.view(torch.uint8)
    ends = 8 + (1 + 8 * widths.long()).cumsum(0)
    groups = int((ends <= len(stored)).sum())
    planes = (indices[:groups].view(-1, 1, 8, 8) & _BITS.view(8, 1, 1)).ne(0).to(torch.uint8).mul(_BITS).sum(3)
    stream = planes.to(torch.uint8)[_used(widths[:groups])].reshape(-1)
    stored[:8].view(torch.int64).fill_(groups)
    stored[8 : 8 + groups] = widths[:groups]
    stored[8 + groups : 8 + groups + len(stream)] = stream
    overflow.view(torch.uint8)[: len(highest) - groups * GROUP] = highest[groups * GROUP :]


def _decode(
    out: torch.Tensor, counts: torch.Tensor, fixed: torch.Tensor, mantissa: torch.Tensor, overflow: torch.Tensor
) -> None:
    numbers = out.view(torch.uint8).view(-1, out.element_size())
    numbers[:, :-1] = mantissa.view(torch.uint8).view(len(numbers), -1)
    stored = fixed.view(torch.uint8)
    groups = int(stored[:8].view(torch.int64))
    used = _used(stored[8 : 8 + groups])
    planes = torch.zeros(groups, 8, 8, dtype=torch.uint8, device=out.device)
    planes[used] = stored[8 + groups :][: 8 * int(used.sum())].view(-1, 8)
    bits = (planes.unsqueeze(3) & _BITS).ne(0).to(torch.uint8)
    indices = bits.view(groups, 8, GROUP).mul(_BITS.view(8, 1)).sum(1)
    numbers[: groups * GROUP, -1] = _by_frequency(counts).to(torch.uint8)[indices].view(-1)
    numbers[groups * GROUP :, -1] = overflow.view(torch.uint8)[: len(numbers) - groups * GROUP]


def _by_frequency(counts: torch.Tensor) -> torch.Tensor:
    """The values of a byte [256], the most frequent first."""
    return counts.view(-1).argsort(descending=True, stable=True)


def _used(widths: torch.Tensor) -> torch.Tensor:
    """Whether each of the 8 bit planes of a group is written, from the group's width: [groups, 8] bool."""
    return torch.arange(8, device=widths.device) < widths.unsqueeze(1)
