"""Projections that stay whole on every tensor rank and stand at the entry of a region.

MLA's down-projections (DeepSeek-V2, arXiv 2405.04434 section 2.1): their outputs are narrow and go to every rank. So
they are computed outside of the region (on sequence shards, where there are some), and what enters it is their output.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ds_npu.parallel.tensor.region import RandomNumbers, RegionInput, around


def make_latent(module: nn.Module, outside: RandomNumbers = nullcontext) -> None:
    """Let ``module`` take in a RegionInput by what it makes of it, with the random numbers of ``outside``."""

    def latent(forward: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if isinstance(x, RegionInput):
            with outside():
                narrow = forward(x.source, **kwargs)
            return RegionInput.of(narrow, x.axis, x.shards).entered()
        result: torch.Tensor = forward(x, **kwargs)
        return result

    around(module, latent)
