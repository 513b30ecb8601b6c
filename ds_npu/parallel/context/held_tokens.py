"""The tokens of the running batch that a context rank holds, for whoever records what modules compute."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_npu.parallel.runtime.marks import Mark

HELD_TOKENS: Mark[Callable[[], torch.Tensor | None]] = Mark("held tokens")
"""A function of a model whose sequences are sharded: the indices in their sequences of this rank's tokens in the
running forward, int64 [1 or B, tokens]; None in a forward of whole sequences."""
