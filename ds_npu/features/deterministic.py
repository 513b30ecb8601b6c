"""``ds_npu.deterministic``: the same bits from the same run."""

from __future__ import annotations

from ds_npu.features.feature import Feature

DETERMINISTIC: Feature[bool] = Feature("deterministic", planned=("deterministic",))
