"""Every feature, in the order in which they are applied, and the one type of the ``"ds_npu"`` section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from ds_npu.config.checkpoint import CheckpointSection
from ds_npu.config.context_parallel import ContextParallelSection
from ds_npu.config.dump import DumpSection
from ds_npu.config.fused_ops import FusedOpsSection
from ds_npu.config.hccl import HcclSection
from ds_npu.config.moe import MoeSection
from ds_npu.config.muon import MuonSection
from ds_npu.config.optimizer_memory import OptimizerMemorySection
from ds_npu.config.parallel import ParallelSection
from ds_npu.config.pipeline import PipelineSection
from ds_npu.config.profile import ProfileSection
from ds_npu.config.recompute import ModuleGlob, RecomputeSection
from ds_npu.config.roles import Role
from ds_npu.config.section import AtLeastOne, Section
from ds_npu.config.swap import SwapSection
from ds_npu.config.watch import WatchSection

# Strict mode would want a Role, which JSON does not have.
Plan = dict[ModuleGlob, Annotated[Role, Field(strict=False)]]
TensorOverlap = Literal["none", "pipelined", "fused"]
PLANNED = "planned"
"""The value with which the plan for ``recompute.budget_gib`` chooses the tokens of a chunk of the loss."""
ChunkedLossTokens = bool | Literal["planned"] | AtLeastOne
MemoryReport = bool | Annotated[str, Field(pattern=r"\.svg$", description="the name of an .svg file")]


class DsNpuConfig(Section):
    """The "ds_npu" section of a DeepSpeed config: parallelism, operators and memory on Ascend NPUs."""

    # A key that is a section is described by the section's docstring.

    parallel: ParallelSection = ParallelSection()
    plan: Plan = Field(default={})
    """Roles of the model's modules, from a glob over their names to a role, where ds_npu cannot tell by itself."""
    fused_ops: FusedOpsSection = FusedOpsSection()
    tensor_overlap: TensorOverlap | None = None
    """Overlap of sequence_parallel's messages with products: none, in pieces, in one kernel; left out: by estimates."""
    context_parallel: ContextParallelSection = ContextParallelSection()
    pipeline: PipelineSection = PipelineSection()
    moe: MoeSection = MoeSection()
    recompute: RecomputeSection = RecomputeSection()
    swap: SwapSection = SwapSection()
    optimizer_memory: OptimizerMemorySection = OptimizerMemorySection()
    muon: MuonSection = MuonSection()
    chunked_loss: ChunkedLossTokens = False
    """Compute logits and loss of a chunk of tokens at a time in training on labels; true: 1024; planned: by a plan."""
    memory_report: MemoryReport = False
    """Print what device memory is used for at the peak of the second step; an .svg file: write a picture of it, too."""
    deterministic: bool = False
    """Use deterministic kernels and communication only, so that a run repeats bit for bit."""
    hccl: HcclSection = HcclSection()
    checkpoint: CheckpointSection = CheckpointSection()
    watch: WatchSection = WatchSection()
    dump: DumpSection = DumpSection()
    profile: ProfileSection = ProfileSection()

    @property
    def axes(self) -> ParallelSection:
        """``parallel``, with the expert ranks that ``moe.tp_extends_ep`` makes of tensor ranks."""
        expert = self.parallel.expert * (self.parallel.tensor if self.moe.tp_extends_ep else 1)
        return self.parallel.model_copy(update={"expert": expert})


def switched_on(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys that ask for something, as (path within the section, value): neither false nor the default."""
    for key, value in section:
        if isinstance(value, Section):
            yield from switched_on(value, f"{prefix}{key}.")
        elif value is not False and value != (field := type(section).model_fields[key]).default:
            yield f"{prefix}{field.alias or key}", value
