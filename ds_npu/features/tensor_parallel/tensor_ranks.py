"""``ds_npu.parallel`` shards the weights of a build's model over the tensor ranks.

``ds_npu.tensor_overlap``: their collectives overlap with matrix multiplications; if left out, estimates decide on NPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import nn

from ds_npu.config.parallel import ParallelSection
from ds_npu.config.roles import Role
from ds_npu.config.sections import TensorOverlap
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change, Phase
from ds_npu.features.tensor_parallel.probe import check_sharding
from ds_npu.features.tensor_parallel.sharded_model import declare_shards, sharded_model_of
from ds_npu.log import logger
from ds_npu.models import names
from ds_npu.models.kinds import own_shapes
from ds_npu.models.plan import ModelPlan
from ds_npu.ops import matmul_collective
from ds_npu.parallel.tensor.axis import Always, SerialCollectives
from ds_npu.parallel.tensor.overlap_choice import OverlapChoice


def _asked(section: ParallelSection, build: Build) -> str:
    asked = f"tensor {section.tensor}, sequence_parallel {str(section.sequence_parallel).lower()}"
    return asked if section.tensor > 1 else ""


def _parts(section: ParallelSection, build: Build) -> Iterable[Change]:
    if section.sequence_parallel:
        make = partial(_provide_sequence_shards, build)
        yield Change("provides", "sequence shards", "between tensor-parallel regions", make)
    if section.tensor > 1:
        yield build.same_random_numbers("tp", "tensor")
        if whole := [] if build.is_planned or sharded_model_of(build.model) else whole_parts(build.model, build.plan):
            yield Change("checks", "parts of blocks", "those without a known role", partial(_tell_whole, whole, build))
        if section.probe and not build.is_planned and sharded_model_of(build.model) is None:
            args = (build.model, build.plan, build.topology, section.sequence_parallel)
            yield Change("checks", "probe", "a block of each kind, sharded and whole", partial(check_sharding, *args))


def whole_parts(model: nn.Module, plan: ModelPlan) -> list[str]:
    """The modules of blocks with matrices that are whole on each tensor rank, since nothing is known of them."""
    inside = (name for name in plan.named(Role.REPLICATED) if plan.block(name) is not None)
    found = {name: model.get_submodule(name) for name in inside}
    with_matrix = (name for name, each in found.items() if any(len(size) > 1 for size in own_shapes(each).values()))
    return list(dict.fromkeys(names.generic(names.plain(name)) for name in with_matrix))


def _tell_whole(whole: list[str], build: Build) -> None:
    if build.topology.global_rank == 0:
        logger().info(
            "parallel.tensor: whole on each tensor rank, since nothing says what they are: %s. ds_npu.plan can give "
            "them roles",
            ", ".join(whole),
        )


def _provide_sequence_shards(build: Build) -> None:
    build.sequence_parallel = True
    # Pieces save nothing on the CPU, where the products and the messages share the cores.
    if build.collectives is None and build.device_type == "npu" and build.topology.size("tp") > 1:
        has_kernels = matmul_collective.why_unavailable() is None
        build.collectives = OverlapChoice(build.topology.group("tp"), build.machine, None, has_kernels)


def _declare(section: ParallelSection, build: Build) -> Iterable[Change]:
    # Layers of a user's own may be parallel already.
    if section.tensor == 1 or sharded_model_of(build.model) is not None:
        return []
    options = (section.sequence_parallel, build.collectives, build.device_type)
    return declare_shards(build.model, build.plan, build.topology, *options)


PARALLEL: Feature[ParallelSection] = Feature(
    "parallel",
    Phase.SHARDS,
    declare=_declare,
    parts=_parts,
    asked=_asked,
    without_plan=lambda build: "tensor parallelism needs one",
)


def _unmet_overlap(overlap: TensorOverlap | None) -> list[str]:
    reason = matmul_collective.why_unavailable() if overlap == "fused" else None
    return [f"its kernels are not available: {reason}"] if reason else []


def _overlap_parts(overlap: TensorOverlap | None, build: Build) -> Iterable[Change]:
    if overlap is None or build.topology.size("tp") == 1:
        return
    group = build.topology.group("tp")
    part = "products with collectives of sequence parallelism"
    if overlap == "none":
        make = partial(setattr, build, "collectives", Always(SerialCollectives(group)))
        yield Change("provides", part, "one after the other", make)
    else:
        make = partial(setattr, build, "collectives", OverlapChoice(group, build.machine, overlap))
        yield Change("provides", part, overlap, make)


TENSOR_OVERLAP: Feature[TensorOverlap | None] = Feature(
    "tensor_overlap",
    parts=_overlap_parts,
    asked=lambda overlap, build: overlap if overlap not in (None, "none") else "",
    unmet=_unmet_overlap,
)
