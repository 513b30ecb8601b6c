"""``ds_npu.dump``: tensors of whole steps, written for ``ds_npu compare``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ds_npu.config.recompute import ModuleGlob
from ds_npu.config.section import AtLeastZero, Section


class DumpSection(Section):
    """Tensors of whole optimizer steps, written for ds_npu compare: of which steps and modules, and where to."""

    steps: list[AtLeastZero] = Field(default=[])
    """Optimizer steps to dump, the first is 0: weights, outputs and their gradients, gradients, optimizer state."""
    modules: list[ModuleGlob] = Field(default=[])
    """Globs over names of blocks, attention, MLPs and norms to dump, with the weights in them; left out: all."""
    what: Literal["statistics", "tensors"] = "statistics"
    """Sum, sum of squares, least and largest value of each tensor; or these and the tensors themselves."""
    folder: str = Field(default="ds_npu_dump", min_length=1)
    """The folder, a non-empty string, that all ranks write to, each files of its own."""
