"""Down-projections of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1) before a region.

Their outputs are narrow and go to every tensor rank. So each rank computes them whole, outside of the region (on
sequence shards, where there are some), and their output enters it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ds_npu.parallel.runtime.forward_wraps import Level, wrap_forward
from ds_npu.parallel.tensor.region import RegionInput


def make_latent(module: nn.Module) -> None:
    """Run ``module`` before the tensor-parallel region; its output enters the region."""

    def latent(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, RegionInput):
            return RegionInput.of(forward(x.source), x.axis, x.shards).entered()
        return forward(x)

    wrap_forward(module, latent, Level.REGION)
