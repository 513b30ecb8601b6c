"""``ds_npu.parallel`` shards the weights of a build's model over the tensor ranks.

``ds_npu.tensor_overlap``: their collectives overlap with matrix multiplications.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from ds_npu.config.parallel import ParallelSection
from ds_npu.config.sections import TensorOverlap
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change, Phase
from ds_npu.features.tensor_parallel.probe import check_sharding
from ds_npu.features.tensor_parallel.sharded_model import declare_shards, sharded_model_of
from ds_npu.ops import matmul_collective
from ds_npu.parallel.tensor.overlapped_matmul import Fused, Pipelined


def _asked(section: ParallelSection, build: Build) -> str:
    asked = f"tensor {section.tensor}, sequence_parallel {str(section.sequence_parallel).lower()}"
    return asked if section.tensor > 1 else ""


def _parts(section: ParallelSection, build: Build) -> Iterable[Change]:
    if section.sequence_parallel:
        make = partial(setattr, build, "sequence_parallel", True)
        yield Change("provides", "sequence shards", "between tensor-parallel regions", make)
    if section.tensor > 1:
        yield build.same_random_numbers("tp", "tensor")
        if section.probe and not build.is_planned and sharded_model_of(build.model) is None:
            args = (build.model, build.plan, build.topology, section.sequence_parallel)
            yield Change("checks", "probe", "a block of each kind, sharded and whole", partial(check_sharding, *args))


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


def _unmet_overlap(overlap: TensorOverlap) -> list[str]:
    reason = matmul_collective.why_unavailable() if overlap == "fused" else None
    return [f"its kernels are not available: {reason}"] if reason else []


def _overlap_parts(overlap: TensorOverlap, build: Build) -> Iterable[Change]:
    if overlap != "none":
        group = build.topology.group("tp")
        pipelined = Pipelined(group)
        collectives = Fused(group, pipelined) if overlap == "fused" else pipelined
        make = partial(setattr, build, "collectives", collectives)
        yield Change("provides", "products with collectives of sequence parallelism", overlap, make)


TENSOR_OVERLAP: Feature[TensorOverlap] = Feature(
    "tensor_overlap",
    parts=_overlap_parts,
    asked=lambda overlap, build: "" if overlap == "none" else overlap,
    unmet=_unmet_overlap,
)
