"""Projections that stay whole on every tensor rank and stand at the entry of a region.

MLA's down-projections (DeepSeek-V2, arXiv 2405.04434 section 2.1): their outputs are narrow and go to every rank. So
they are computed outside of the region (on sequence shards, where there are some), and what enters it is their output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_npu.parallel.forward_wraps import wrap_forward
from ds_npu.parallel.tensor.region import RegionInput


def make_latent(module: nn.Module) -> None:
    """Let ``module`` take in a RegionInput by what it makes of it."""

    def latent(forward: Any, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, RegionInput):
            return RegionInput.of(forward(x.source), x.axis, x.shards).entered()
        result: torch.Tensor = forward(x)
        return result

    wrap_forward(module, latent)
