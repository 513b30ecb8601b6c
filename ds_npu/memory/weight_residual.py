"""A float32 weight as its bf16 rounding and the remainder of the rounding: two tensors of 16 bits.

bf16 has the upper 16 bits of a float32, rounded to nearest, ties to even. As integers, bits(master) = 65536 x
bits(weight) + remainder, and the remainder is in [-32768, 32768]: one value more than 16 bits hold. -32768 and 32768
are ties, which only an even bf16 has, and of both sides: 65,537 float32s are rounded to it, so 16 bits cannot tell them
apart. The remainder is kept in int16 as -32768 for both, and the indices where it is 32768 in a list. Of random weights
that is one in 131,072. The pair is exact for every float32 but the payloads of NaNs, which remain NaNs. Source:
MindSpeed's reuse-fp32-param, which keeps that bit in the sign of Adam's second moment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

TIE = 32768


class Residual(NamedTuple):
    """The difference of a float32 master and its bf16 weight."""

    remainder: torch.Tensor
    """int16, of the weight's shape."""
    ties: torch.Tensor
    """int64 [ties]: the flat indices at which the remainder is 32768, and int16 holds -32768."""


def residual_of(master: torch.Tensor, weight: torch.Tensor) -> Residual:
    """The residual of ``master`` (float32, contiguous), whose rounding is ``weight`` (bf16, contiguous, as large).

    The host waits for the device once: it needs the number of ties to make a tensor of them.
    """
    remainder = master.view(torch.int32) - _upper(weight)
    is_tie = remainder == TIE
    # A copy: on an NPU the result of nonzero has the memory of an index for each element.
    ties = is_tie.view(-1).nonzero().view(-1).clone()
    # Ties, which are out of int16's range, are not left to the cast: devices differ in it.
    return Residual(remainder.masked_fill_(is_tie, -TIE).to(torch.int16), ties)


def master_of(weight: torch.Tensor, residual: Residual) -> torch.Tensor:
    """The float32 master, in a new tensor of the shape of ``weight`` (bf16, contiguous)."""
    bits = residual.remainder.to(torch.int32)
    if residual.ties.numel():
        bits.view(-1)[residual.ties] = TIE
    return bits.add_(_upper(weight)).view(torch.float32)


def _upper(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16).to(torch.int32).mul_(1 << 16)
