"""Lamb and Lion, which DeepSpeed writes in torch operators for NPUs."""

from __future__ import annotations

from ds_npu.ops.builders import builder


class FusedLambBuilder(builder.upstream("FusedLambBuilder")):  # type: ignore[misc]
    """Lamb (``FusedLamb``)."""

    NAME = "fused_lamb"


class FusedLionBuilder(builder.upstream("FusedLionBuilder")):  # type: ignore[misc]
    """Lion (``FusedLion``)."""

    NAME = "fused_lion"
