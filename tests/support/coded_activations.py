"""Sizes with which tiny activations are coded, and do not all fit into their codes."""

from __future__ import annotations

import pytest
import torch

from ds_npu.memory import host_storage
from ds_npu.ops import exponent_code


def code_everything(patch: pytest.MonkeyPatch, room: float) -> None:
    """Code all storages of a multiple of 64 numbers, in ``room`` bytes for each highest byte, even if they grow."""
    patch.setattr(exponent_code, "LEAST", exponent_code.GROUP)
    patch.setattr(exponent_code, "MOST_SHARE", float("inf"))
    patch.setattr(exponent_code, "HEADER", 0)
    patch.setattr(exponent_code, "CORE_TAIL", 0)
    patch.setattr(exponent_code, "ALIGNMENT", 64)
    patch.setattr(exponent_code, "CODE_RATIO", dict.fromkeys(exponent_code.CODE_RATIO, room))


def overflow_bytes(device: torch.device | str = "cpu") -> int:
    """Of all that was ever coded at a time."""
    return host_storage.overflow_pool(torch.device(device)).size
