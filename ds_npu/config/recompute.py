"""``ds_npu.recompute``: activations computed again in backward instead of kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_npu.config.section import AtLeastOne, Section

Gib = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ModuleGlob = Annotated[str, Field(min_length=1, description="a non-empty string")]


class RecomputeSection(Section):
    """What is recomputed, by layer, by module, or by part of a layer."""

    layers: Literal["none", "all"] | AtLeastOne = "none"
    """Which layers are recomputed whole: none, all, or how many (see method)."""
    method: Literal["uniform", "block"] | None = None
    """A count of layers is the length of each recomputed run (uniform) or of the first run only (block)."""
    modules: list[ModuleGlob] = Field(default=[])
    """Globs over the names of modules to recompute."""
    activation_function: bool = False
    """Recompute the activation function of each feed-forward layer."""
    norm: bool = False
    """Recompute the norms."""
    attention_core: bool = False
    """Recompute attention between its projections."""
    budget_gib: Gib | None = None
    """Device memory to stay within, in GiB: ds_npu then chooses what to recompute; null: no budget."""
