"""Whether Muon can step whole matrices, as far as DeepSpeed's config tells it; settings of its parameter groups."""

from __future__ import annotations

from ds_npu.config.deepspeed_keys import value_at
from ds_npu.config.problems import Config

MUON = "use_muon"
"""DeepSpeed's setting of the parameter groups that Muon steps."""
BY_ELEMENT = "momentum_by_element"
"""The setting of groups whose momenta lie as their weights do; DeepSpeed's own in ZeRO 1 and 2 do not."""
ZERO = "zero_optimization"
WHERE = (f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_param.device")


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
