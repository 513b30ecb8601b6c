"""``ds_npu.chunked_loss``: logits and loss of a chunk of tokens at a time."""

from __future__ import annotations

from typing import Literal

from ds_npu.config.section import AtLeastOne

PLANNED = "planned"
"""The plan for ``recompute.budget_gib`` chooses the number."""
ChunkedLossTokens = bool | Literal["planned"] | AtLeastOne
"""Whether the loss is chunked; a number is the tokens of a chunk."""
