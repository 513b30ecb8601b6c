"""``ds_npu.muon``: how Muon's updates are made."""

from __future__ import annotations

from typing import Literal

from ds_npu.config.section import Section


class MuonSection(Section):
    """The updates of optimizer.type Muon."""

    scale: Literal["aspect", "rms"] = "aspect"
    """Factor of updates: sqrt(rows / columns) of tall ones (DeepSpeed), or one that makes their RMS 0.2 (Moonlight)."""
    coefficients: Literal["jordan", "you", "polar_express"] = "jordan"
    """Coefficients of the iteration: Jordan's 5 steps (DeepSpeed's), You's 5, or the 8 of Polar Express."""
