"""``ds_npu.muon``: how Muon's updates are made, and what it is not used with as far as DeepSpeed's config tells it."""

from __future__ import annotations

from typing import Literal

from ds_npu.config.deepspeed_keys import value_at
from ds_npu.config.problems import Config
from ds_npu.config.section import Section

ZERO = "zero_optimization"
WHERE = (f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_param.device")


class MuonSection(Section):
    """The updates of optimizer.type Muon."""

    scale: Literal["aspect", "rms"] = "aspect"
    """Factor of an update: sqrt(rows / columns) of tall ones (DeepSpeed's), or one that makes its RMS 0.2 (Moonlight)."""
    coefficients: Literal["jordan", "you", "polar_express"] = "jordan"
    """Coefficients of the iteration: Jordan's 5 steps (DeepSpeed's), You's 5, or the 8 of Polar Express."""


def why_not_on_whole_matrices(ds_config: Config) -> str | None:
    """Why Muon cannot step whole matrices with ``ds_config``: the key, what was found, the way out; None if it can."""
    for key in WHERE:
        if (found := value_at(ds_config, key)) not in (None, "none"):
            return (
                f"{key}: found {found} with optimizer.type Muon, whose matrices are orthogonalised on the device. "
                "What to do: leave it out; or AdamW"
            )
    if value_at(ds_config, f"{ZERO}.zenflow") is not None:
        return f"{ZERO}.zenflow: it steps parts of weights, optimizer.type Muon whole ones. What to do: leave it out"
    return None
