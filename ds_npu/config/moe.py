"""``ds_npu.moe``: mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ds_npu.config.section import AboveZero, AtLeastZero, Section


@dataclass(frozen=True)
class Dispatching:
    """The abilities of a dispatcher: its class declares them, and rules and features read them."""

    sends_to: Literal["ranks", "experts", "all ranks"]
    """A token goes once to each rank of its experts, once to each of its experts, or to every rank."""
    overlaps: bool = True
    """Whether other work may be computed while tokens travel (``overlap``, ``pipeline.overlap_experts``)."""
    recomputes: bool = True
    """Whether ``zero_memory`` works with the dispatcher."""
    replicates: bool = True
    """Whether ``replica_rows`` works with the dispatcher."""
    shards_experts: bool = True
    """Whether a token reaches all ranks that share its expert (``parallel.expert_tensor``)."""
    presizes: bool = False
    """Whether buffers can be sized before the counts are known, with spare rows (``row_margin``)."""
    padded: str | None = None
    """The dispatcher that replaces it under ``pad_to_capacity``, where all experts take equally many rows, if any."""
    why: str = ""
    """The reason for its missing abilities, as a clause that follows its name."""


ABILITIES = {
    "alltoall": Dispatching("ranks", presizes=True, padded="evenly"),
    "allgather": Dispatching("all ranks"),
    "fused": Dispatching(
        "experts",
        overlaps=False,
        recomputes=False,
        replicates=False,
        shards_experts=False,
        why=", whose kernels compute all at once",
    ),
}
"""The abilities of each value of ``moe.dispatcher``."""
DEFAULT_DISPATCHER = "alltoall"


def able(can: Callable[[Dispatching], object]) -> str:
    """The dispatchers with an ability, as errors list them: ``'alltoall' or 'allgather'``."""
    return " or ".join(repr(name) for name, each in ABILITIES.items() if can(each))


def _known(name: str) -> str:
    if name not in ABILITIES:
        raise ValueError(name)
    return name


DispatcherName = Annotated[
    str, AfterValidator(_known), Field(json_schema_extra=lambda schema: schema.update(enum=[*ABILITIES]))
]


class AuxLossSection(Section):
    """A loss that balances the load of experts, added to the loss that the model returns in training."""

    coefficient: AboveZero | None = None
    """How much of it is added for each layer; left out: none."""
    over: Literal["micro_batch", "sequence", "global_batch"] = "micro_batch"
    """Balance each micro-batch, each sequence, or the micro-batches that all ranks have at the same time."""


class MoeSection(Section):
    """How tokens reach their experts, and how the experts compute."""

    dispatcher: DispatcherName | None = None
    """Send each token to its experts' ranks, every token to every rank, or in one kernel with the products (A3)."""
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
    row_margin: AboveZero | None = None
    """Send in buffers of so many times the rows that earlier forwards needed; no layer waits, overflow is redone."""
    aux_loss: AuxLossSection = AuxLossSection()
    z_loss: AboveZero | None = None
    """How much of the mean square of the router logits' logsumexp is added to the loss for each layer."""
    bias_update_rate: AboveZero | None = None
    """Amount added to or taken from the router's e_score_correction_bias after each step, by each expert's load."""
    load_report: str | None = None
    """An SVG file that is written at DeepSpeed's logging interval: tokens by expert and step."""
    placement_interval: AtLeastZero = 0
    """Optimizer steps after which experts move between ranks, where that makes their load more even; 0 never."""
    replica_rows: AtLeastZero = 0
    """Ranks with few rows compute experts of ranks with many, where each takes so many rows or more; 0: never."""

    @property
    def dispatching(self) -> Dispatching:
        """The abilities of the dispatcher."""
        return ABILITIES[self.dispatcher or DEFAULT_DISPATCHER]

    @property
    def computes(self) -> bool:
        """Whether ds_npu computes experts also where each rank has all of them."""
        return bool(self.grouped_matmul) or self.zero_memory != "none" or self.capacity_factor is not None

    @property
    def has_losses(self) -> bool:
        """Whether anything is added to the loss of a model."""
        return self.aux_loss.coefficient is not None or self.z_loss is not None
