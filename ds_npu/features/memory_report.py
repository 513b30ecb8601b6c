"""``ds_npu.memory_report``: where device memory goes."""

from __future__ import annotations

from ds_npu.features.feature import Feature

MEMORY_REPORT: Feature[bool] = Feature("memory_report", planned=("memory_report",))
