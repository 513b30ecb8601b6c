"""A checksum of a batch, by which the ranks that share it find out that they were given different ones.

All integer tensors of the batch count, words, labels and masks among them; where there are none, the bits of its last
tensor. It is a sum of them, each number times one of ``_weights``, computed where the tensors are: on a device, three
kernels (they are concatenated, multiplied and added up), one more for each tensor that is not of 64 bits, and 8 bytes
that go to the host while the batch runs.
Two different batches have one checksum of 64 bits with a chance of about 2**-60.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ds_npu.comm.host_copy import HostCopy, copy_to_device

MOST = 1 << 20
"""How many numbers of a tensor count at most, at equal distances: images may be large."""
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Shifts and factors of splitmix64 (Steele, Lea and Flood, 2014)."""
GOLDEN = 0x9E3779B97F4A7C15


class BatchChecksum:
    """The checksum of the tensors in ``batch``; the host waits for nothing until it reads it."""

    def __init__(self, batch: Any) -> None:
        tensors = [each.detach() for each in tree_leaves(batch) if isinstance(each, torch.Tensor)]
        self._shapes = [tuple(each.shape) for each in tensors]
        integers = [each for each in tensors if not each.is_floating_point() and not each.is_complex()]
        counted = integers or [_bits(each) for each in tensors[-1:]]
        devices = sorted({each.device for each in counted}, key=str)
        self._sums = [HostCopy(_sum([each for each in counted if each.device == device])) for device in devices]

    def read(self, bits: int, salt: int = 0) -> int:
        """The checksum in ``bits`` bits; another ``salt`` gives another one.

        The host waits until the device has it.
        """
        sums = [int(each.read()) for each in self._sums]
        digest = hashlib.blake2b(repr((salt, self._shapes, sums)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> (64 - bits)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.contiguous().view(SIGNED[tensor.element_size()])


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The weighted sum of all numbers of ``tensors``, which are on one device."""
    flat = [_some(each.reshape(-1)).to(torch.int64) for each in tensors]
    whole = torch.cat(flat) if len(flat) > 1 else flat[0]
    weights = _weights_on(1 << (whole.numel() - 1).bit_length() if whole.numel() else 1, whole.device)
    return (whole * weights[: whole.numel()]).sum()


def _some(flat: torch.Tensor) -> torch.Tensor:
    return flat[:: -(-flat.numel() // MOST)] if flat.numel() > MOST else flat


@functools.lru_cache(maxsize=4)
def _weights_on(count: int, device: torch.device) -> torch.Tensor:
    return copy_to_device(_weights(count), device)


def _weights(count: int) -> torch.Tensor:
    """Numbers of 64 bits that look random; the first of them are the same whatever their ``count``."""
    numbers = torch.arange(1, count + 1) * _signed(GOLDEN)
    for shift, factor in STEPS:
        # The shift of a signed number repeats its sign.
        numbers = (numbers ^ ((numbers >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return numbers


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
