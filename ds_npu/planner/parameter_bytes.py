"""The bytes that a parameter takes on a rank for training with AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def bytes_of_a_parameter(ds_config: Mapping[str, Any], stage: int, ranks: int) -> float:
    """Bytes of weight, gradient, master weight and two moments of a parameter that ZeRO shards over ``ranks``."""
    is_narrow = any(ds_config.get(key, {}).get("enabled") is True for key in ("bf16", "fp16"))
    parts = ((2, 3), (2, 2), (12, 1)) if is_narrow else ((4, 3), (4, 2), (8, 1))
    return sum(size / (ranks if stage >= sharded_from else 1) for size, sharded_from in parts)
