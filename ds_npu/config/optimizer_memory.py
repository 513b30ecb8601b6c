"""``ds_npu.optimizer_memory``: what the optimizer keeps on the device."""

from __future__ import annotations

from typing import Literal

from ds_npu.config.section import Section


class OptimizerMemorySection(Section):
    """Ways to make the optimizer's state smaller."""

    swap: bool = False
    """Keep the state in host memory and bring it in piece by piece during the step."""
    share_fp32: bool = False
    """Keep the bf16 weight as the upper half of its fp32 master weight."""
    moments: Literal["fp32", "int8"] = "fp32"
    """Type in which Adam's moments are kept."""
