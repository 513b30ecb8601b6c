"""``ds_npu.recompute``: activations computed again in backward instead of kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_npu.config.section import AboveZero, AtLeastOne, Section

ModuleGlob = Annotated[str, Field(min_length=1, description="a non-empty string")]


class RecomputeSection(Section):
    """Activations to recompute, by layer, by module, or by part of a layer."""

    layers: Literal["none", "all"] | AtLeastOne = "none"
    """Layers that are recomputed whole: none, all (each by itself), or a number that method gives a meaning."""
    method: Literal["uniform", "block"] | None = None
    """Number of layers: runs of so many, of which the first input is kept (uniform), or the first so many (block)."""
    modules: list[ModuleGlob] = Field(default=[])
    """Globs over the names of modules to recompute."""
    keep: list[Literal["matmul", "attention"]] = Field(default=[])
    """Results that recomputed layers and modules keep: those of matrix products, of attention kernels."""
    activation_function: bool | list[ModuleGlob] = Field(default=False)
    """Recompute what feed-forward layers (globs: in these modules) compute between linears; do not keep its output."""
    norm: bool | list[ModuleGlob] = Field(default=False)
    """Recompute the norms (globs: in these modules), and do not keep their outputs."""
    attention_core: bool = False
    """Recompute attention between its projections, which keeps its scores where it is not one kernel (eager)."""
    budget_gib: AboveZero | None = None
    """Most device memory of a rank, in GiB: ds_npu chooses what to recompute; null: no budget."""
