"""``ds_npu.swap``: activations that wait for backward in host memory."""

from __future__ import annotations

from ds_npu.config.swap import SwapSection
from ds_npu.features.build import Build
from ds_npu.features.declaration import Phase
from ds_npu.features.feature import Feature
from ds_npu.features.swapped_modules import KEY, swap_changes


def _asked(section: SwapSection, build: Build) -> str:
    hidden = ", as much as is hidden" if section.hidden_only else ""
    depth = "" if section.depth is None else f", copied back {section.depth} ahead"
    return f"{KEY} {section.activations}{hidden}{depth}" if section.activations else ""


SWAP: Feature[SwapSection] = Feature("swap", Phase.WRAPS, declare=swap_changes, asked=_asked)
