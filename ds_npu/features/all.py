"""Every feature, in the order in which they are applied, and the one type of the ``"ds_npu"`` section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from ds_npu.config import Section
from ds_npu.features.chunked_loss import CHUNKED_LOSS
from ds_npu.features.context_parallel import CONTEXT_PARALLEL, ContextParallelSection
from ds_npu.features.deterministic import DETERMINISTIC
from ds_npu.features.feature import Build, Feature
from ds_npu.features.fused_ops import FUSED_OPS, FusedOpsSection
from ds_npu.features.memory_report import MEMORY_REPORT
from ds_npu.features.moe import MOE, MoeSection
from ds_npu.features.optimizer_memory import OPTIMIZER_MEMORY, OptimizerMemorySection
from ds_npu.features.parallel import PARALLEL, ParallelSection
from ds_npu.features.pipeline import PIPELINE, PipelineSection
from ds_npu.features.plan import PLAN, Plan
from ds_npu.features.recompute import RECOMPUTE, RecomputeSection
from ds_npu.features.swap import SWAP, SwapSection
from ds_npu.features.tensor_overlap import TENSOR_OVERLAP, TensorOverlap

FEATURES: tuple[Feature[Any], ...] = (
    TENSOR_OVERLAP,
    PLAN,
    PARALLEL,
    FUSED_OPS,
    CONTEXT_PARALLEL,
    PIPELINE,
    MOE,
    RECOMPUTE,
    SWAP,
    OPTIMIZER_MEMORY,
    CHUNKED_LOSS,
    MEMORY_REPORT,
    DETERMINISTIC,
)


class DsNpuConfig(Section):
    """The "ds_npu" section of a DeepSpeed config: parallelism, operators and memory on Ascend NPUs."""

    # A key that is a section is described by the section's docstring.

    parallel: ParallelSection = ParallelSection()
    plan: Plan = Field(default={})
    """Roles of the model's modules, from a glob over their names to a role, where ds_npu cannot tell by itself."""
    fused_ops: FusedOpsSection = FusedOpsSection()
    tensor_overlap: TensorOverlap = "none"
    """Overlap of tensor-parallel communication with its matrix multiplication: none, in pieces, or in one kernel."""
    context_parallel: ContextParallelSection = ContextParallelSection()
    pipeline: PipelineSection = PipelineSection()
    moe: MoeSection = MoeSection()
    recompute: RecomputeSection = RecomputeSection()
    swap: SwapSection = SwapSection()
    optimizer_memory: OptimizerMemorySection = OptimizerMemorySection()
    chunked_loss: bool = False
    """Compute logits and loss a piece of the sequence at a time, so that the full logits never exist."""
    memory_report: bool = False
    """Report what device memory is used for."""
    deterministic: bool = False
    """Use deterministic kernels and communication only, so that a run repeats bit for bit."""


def switched_on(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys that ask for something, as (path within the section, value): neither false nor the default."""
    for key, value in section:
        if isinstance(value, Section):
            yield from switched_on(value, f"{prefix}{key}.")
        elif value is not False and value != type(section).model_fields[key].default:
            yield f"{prefix}{key}", value


def planned_part(path: str) -> str | None:
    """What of the section is not built yet: the key at ``path``, the section that holds it, or None if it is built."""
    parts = (part for feature in FEATURES for part in feature.planned)
    return next((part for part in parts if path == part or path.startswith(f"{part}.")), None)


def apply_features(config: DsNpuConfig, build: Build) -> None:
    """Let every feature do to ``build`` what ``config`` asks for, in the order of FEATURES."""
    values = dict(config)
    for feature in FEATURES:
        feature.apply(values[feature.key], build)
