"""Forms in which Adam's moments are kept between steps: float32, bf16, or 8 bits in blocks.

Values are rounded up or down by chance, the likelier the nearer, so that they are right on average. Rounded to the
nearest, a moment would not change at all where a step changes it by less than half a unit: with beta 0.999 the second
moment in bf16 never becomes smaller. The chance is drawn from the value itself and a seed: ranks that hold the same
value round it alike, at whatever index of their shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

BLOCK = 256
"""Elements that share a scale in 8 bits."""
DECADES = 7
"""Decades below the largest value of a block that 8 bits tell apart."""
Parts = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Form:
    """A form of a flat float32 tensor."""

    pack: Callable[[torch.Tensor, int], Parts]
    """Packs values; the second argument seeds their rounding."""
    unpack: Callable[[Parts], torch.Tensor]
    """Returns the values in float32; packed once more, they give the same parts."""


def _to_bf16(values: torch.Tensor, seed: int) -> Parts:
    """Add 0 to 65535 to the bits and drop the lower half: the dropped bits are the chance to be rounded up."""
    bits = values.view(torch.int32) + _draws(values, seed)
    return (bits.bitwise_and_(-65536).view(torch.float32).to(torch.bfloat16),)


def _draws(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Integers from 0 to 65535, int32: a hash of the bits of ``values`` (float32) and ``seed``.

    No product exceeds 31 bits: devices differ in the result of an overflow.
    """
    first, second = seed & 0xFFFF, (seed >> 16) & 0xFFFF
    bits = values.view(torch.int32)
    mixed = bits.bitwise_right_shift(16).bitwise_and_(0xFFFF).mul_(31153).add_(bits.bitwise_and(0xFFFF)).add_(first)
    # Each step from here is a bijection of 16 bits, so that all numbers are equally likely.
    for shift, factor, addend in ((8, 28411, second), (7, 23757, first), (9, 31153, second)):
        mixed.bitwise_and_(0xFFFF).bitwise_xor_(mixed.bitwise_right_shift(shift)).mul_(factor).add_(addend)
    return mixed.bitwise_and_(0xFFFF).bitwise_xor_(mixed.bitwise_right_shift(8))


@lru_cache
def _levels(is_signed: bool, device: torch.device) -> torch.Tensor:
    """The 256 values in [-1, 1] or [0, 1] of 8 bits, in order.

    Dynamic quantisation: each decade has twice as many values as the one below. Source: Dettmers et al. 2022, 8-bit
    Optimizers via Block-wise Quantization, arXiv:2110.02861.
    """
    found = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2 ** (decade if is_signed else decade + 1)
        scale = 10.0 ** (decade + 1 - DECADES)
        middles = [scale * (0.1 + 0.9 * (index + 0.5) / count) for index in range(count)]
        found += middles + ([-each for each in middles] if is_signed else [])
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


def _to_int8(is_signed: bool, values: torch.Tensor, seed: int) -> Parts:
    """Return uint8 codes, and of each block the value of largest magnitude, with its sign: its divisor."""
    levels = _levels(is_signed, values.device)
    blocks = _in_blocks(values)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scaled = blocks / largest.masked_fill(largest == 0, 1.0)
    above = torch.searchsorted(levels, scaled, out_int32=True).clamp_(1, 255)
    below = levels[above - 1]
    chance = ((scaled - below) / (levels[above] - below)).mul_(65536).round_()
    codes = above - (_draws(scaled, seed) >= chance).to(torch.int32)
    if not is_signed:
        # A second moment of 0 with a first moment other than 0 would make an update without bound.
        codes = torch.maximum(codes, (scaled > 0).to(torch.int32))
    return codes.to(torch.uint8).view(-1)[: values.numel()], largest.view(-1)


def _from_int8(is_signed: bool, parts: Parts) -> torch.Tensor:
    codes, largest = parts
    values = _levels(is_signed, codes.device)[codes.to(torch.int32)]
    return (_in_blocks(values) * largest.view(-1, 1)).view(-1)[: codes.numel()]


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return [blocks, BLOCK], padded with zeros."""
    missing = math.ceil(values.numel() / BLOCK) * BLOCK - values.numel()
    return torch.nn.functional.pad(values, (0, missing)).view(-1, BLOCK) if missing else values.view(-1, BLOCK)


FP32 = Form(lambda values, _seed: (values,), lambda parts: parts[0])
"""The tensor itself: packing does not copy it."""
BF16 = Form(_to_bf16, lambda parts: parts[0].to(torch.float32))
INT8 = Form(partial(_to_int8, True), partial(_from_int8, True))
INT8_AT_LEAST_ZERO = Form(partial(_to_int8, False), partial(_from_int8, False))
NOT_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq")
"""Adam's second moments."""


def form_of(moments: str, name: str) -> Form:
    """The form of the moment called ``name`` where ``ds_npu.optimizer_memory.moments`` is ``moments``."""
    if moments == "int8":
        return INT8_AT_LEAST_ZERO if name in NOT_NEGATIVE else INT8
    return {"fp32": FP32, "bf16": BF16}[moments]
