"""The bytes that a parameter takes on a rank for training with AdamW, and in the files that the rank saves."""

from __future__ import annotations

from ds_npu.config.problems import Config


def bytes_of_a_parameter(ds_config: Config, stage: int, ranks: int) -> float:
    """Bytes of weight, gradient, master weight and two moments of a parameter that ZeRO shards over ``ranks``."""
    is_narrow = any(ds_config.get(key, {}).get("enabled") is True for key in ("bf16", "fp16"))
    parts = ((2, 3), (2, 2), (12, 1)) if is_narrow else ((4, 3), (4, 2), (8, 1))
    return sum(size / (ranks if stage >= sharded_from else 1) for size, sharded_from in parts)


def saved_bytes_of_a_parameter(ds_config: Config, stage: int, ranks: int) -> float:
    """Bytes of a parameter in the files of a rank that writes weights, too: weight, master weight, two moments.

    Without ZeRO float32 weights have no masters. Under ZeRO 3 weights are saved as masters only.
    """
    is_narrow = any(ds_config.get(key, {}).get("enabled") is True for key in ("bf16", "fp16"))
    weight = 0 if stage == 3 else 2 if is_narrow else 4
    state = 12 if is_narrow or stage else 8
    return weight + state / (ranks if stage else 1)
