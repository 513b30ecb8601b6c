"""``ds_npu.optimizer_memory``: what the optimizer keeps on the device."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_npu.config.section import Section


class OptimizerMemorySection(Section):
    """Ways to make the optimizer's state smaller."""

    swap: bool = False
    """Keep master weights and moments in host memory and bring them in piece by piece during the step."""
    resident_gib: Annotated[float, Field(ge=0)] = 0
    """Optimizer state that swap leaves on the device, in GiB of each rank."""
    share_fp32: bool = False
    """Keep only those bits of each fp32 master weight that its bf16 weight does not have: 2 bytes less, lossless."""
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    """Type in which Adam's moments are kept between steps; int8: in blocks of 256, each with a scale."""
