"""``ds_npu.chunked_loss``: logits and loss a piece of the sequence at a time."""

from __future__ import annotations

from ds_npu.features.feature import Feature

CHUNKED_LOSS: Feature[bool] = Feature("chunked_loss", planned=("chunked_loss",))
