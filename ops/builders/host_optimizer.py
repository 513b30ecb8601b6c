"""Optimizers that run on the host's cores, for ZeRO-Offload: compiled C++."""

from __future__ import annotations

from deepspeed.ops.op_builder import npu

from ds_npu.ops.builders import builder


class CPUAdamBuilder(builder.Compiled, npu.CPUAdamBuilder):  # type: ignore[misc]
    """Adam and AdamW (``DeepSpeedCPUAdam``)."""


class CPUAdagradBuilder(builder.Compiled, npu.CPUAdagradBuilder):  # type: ignore[misc]
    """Adagrad (``DeepSpeedCPUAdagrad``)."""


class CPULionBuilder(builder.Compiled, npu.CPULionBuilder):  # type: ignore[misc]
    """Lion (``DeepSpeedCPULion``)."""
