"""``ds_npu.chunked_loss``: logits and loss of a chunk of tokens at a time."""

from __future__ import annotations

from ds_npu.config.section import AtLeastOne

ChunkedLossTokens = bool | AtLeastOne
"""Whether the loss is chunked; a number is that of the tokens of a chunk."""
