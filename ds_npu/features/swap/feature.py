"""``ds_npu.swap``: activations that wait for backward in host memory."""

from __future__ import annotations

import os

from ds_npu import capability
from ds_npu.config.swap import SwapSection
from ds_npu.features.build import Build
from ds_npu.features.declaration import Phase
from ds_npu.features.feature import Feature
from ds_npu.features.swapped_modules import KEY, swap_changes
from ds_npu.ops import exponent_code


def _asked(section: SwapSection, build: Build) -> str:
    hidden = ", as much as is hidden" if section.hidden_only else ""
    depth = "" if section.depth is None else f", copied back {section.depth} ahead"
    codes = ", compressed" if section.compress else ""
    return f"{KEY} {section.activations}{hidden}{depth}{codes}" if section.activations else ""


def _unmet(section: SwapSection) -> list[str]:
    # On the CPU the code has a formula.
    if not section.compress or os.environ.get("DS_ACCELERATOR") == "cpu" or not capability.torch_npu_state().usable:
        return []
    reason = exponent_code.why_no_codes()
    return [f"compress: {reason}"] if reason else []


SWAP: Feature[SwapSection] = Feature("swap", Phase.WRAPS, declare=swap_changes, asked=_asked, unmet=_unmet)
