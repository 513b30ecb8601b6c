"""The mark by which recorders of module outputs find the tokens that a context rank holds in the running forward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_npu.parallel.runtime.marks import Mark

HELD_TOKENS: Mark[Callable[[], torch.Tensor | None]] = Mark("held tokens")
"""The mark of a model whose sequences are sharded: a function that returns the index of each of this rank's tokens in
its sequence, int64 [1 or B, tokens]; None in a forward of whole sequences."""
