"""``ds_npu.swap``: activations that wait for backward in host memory."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ds_npu.config.recompute import ModuleGlob
from ds_npu.config.section import Section


class SwapSection(Section):
    """Activations that move to host memory and back."""

    activations: bool | list[ModuleGlob] = Field(default=False)
    """Keep what blocks save for backward in host memory until then; globs: what these modules save."""
    hidden_only: bool = False
    """Swap of each module only so much that a copy takes no longer than the module computes, largest tensors first."""
    depth: Annotated[int, Field(ge=1, le=4)] | None = None
    """How many modules ahead copies back begin, and how many keep theirs on the device; null: by measured times."""
    compress: bool = False
    """Copy lossless codes: large tensors take 13 of 16 bits in bfloat16, a tenth less in float16 and float32."""
