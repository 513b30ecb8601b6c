"""Lamb and Lion, which DeepSpeed writes in torch operators for NPUs."""

from __future__ import annotations

from deepspeed.ops.op_builder import npu

from ds_npu.ops.builders import builder


class FusedLambBuilder(builder.AscendPaths, npu.FusedLambBuilder):  # type: ignore[misc]
    """Lamb (``FusedLamb``)."""


class FusedLionBuilder(builder.AscendPaths, npu.FusedLionBuilder):  # type: ignore[misc]
    """Lion (``FusedLion``)."""
