"""``ds_npu.moe``: mixture-of-experts layers."""

from __future__ import annotations

from typing import Literal

from ds_npu.config.section import AboveZero, AtLeastZero, Section


class MoeSection(Section):
    """How tokens reach their experts, and how the experts compute."""

    dispatcher: Literal["alltoall", "allgather"] | None = None
    """Send each token to its experts' ranks, or every token to every rank; left out: alltoall."""
    tp_extends_ep: bool = False
    """Distribute whole experts over the tensor ranks too, instead of sharding each expert over them."""
    grouped_matmul: bool | None = None
    """Multiply all experts' tokens in one kernel."""
    overlap: bool = False
    """Send tokens while shared experts compute; in layers without, half of them while the other half's experts do."""
    zero_memory: Literal["none", "level0", "level1"] = "none"
    """Recompute, in backward, nothing, the experts' inputs and activations (level0), or all they compute (level1)."""
    capacity_factor: AboveZero | None = None
    """Drop choices of an expert beyond so many times its even share of a rank's tokens; left out: drop none."""
    capacity_policy: Literal["probs", "position"] = "probs"
    """Keep the choices with the largest routing weights, or those of the first tokens."""
    pad_to_capacity: bool = False
    """Fill every expert up to its capacity, so that no layer waits for the host."""
    placement_interval: AtLeastZero = 0
    """Optimizer steps after which experts move between ranks, where that makes their load more even; 0 never."""
    replica_rows: AtLeastZero = 0
    """Ranks with few rows compute experts of ranks with many, where each takes so many rows or more; 0: never."""

    @property
    def computes(self) -> bool:
        """Whether experts are computed by ds_npu where each rank has all of them, too."""
        return bool(self.grouped_matmul) or self.zero_memory != "none" or self.capacity_factor is not None
