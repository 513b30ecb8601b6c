"""``ds_npu.parallel``: shards the weights of a build's model over the tensor ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from ds_npu.config.parallel import ParallelSection
from ds_npu.features.build import Build
from ds_npu.features.declaration import Change, Phase
from ds_npu.features.feature import Feature
from ds_npu.features.tensor_parallel.probe import check_sharding
from ds_npu.features.tensor_parallel.sharded_model import declare_shards, sharded_model_of
from ds_npu.parallel.tensor.randomness import align_generators


def _asked(section: ParallelSection, build: Build) -> str:
    if section.tensor == 1:
        return ""
    return f"tensor {section.tensor}, sequence_parallel {str(section.sequence_parallel).lower()}"


def _parts(section: ParallelSection, build: Build) -> Iterable[Change]:
    if section.sequence_parallel:
        make = partial(setattr, build, "sequence_parallel", True)
        yield Change("provides", "sequence shards", "between tensor-parallel regions", make)
    if section.tensor > 1:
        make = partial(align_generators, build.topology, build.device_type)
        yield Change("provides", "random generators over tp", "states of the first tensor rank", make)
        if section.probe and not build.is_planned and _is_to_be_sharded(build):
            args = (build.model, build.plan, build.topology, section.sequence_parallel)
            yield Change("checks", "probe", "a block of each kind, sharded and whole", partial(check_sharding, *args))


def _is_to_be_sharded(build: Build) -> bool:
    return sharded_model_of(build.model) is None


def _declare(section: ParallelSection, build: Build) -> Iterable[Change]:
    # Layers of a user's own may be parallel already.
    if section.tensor == 1 or not _is_to_be_sharded(build):
        return []
    options = (section.sequence_parallel, build.collectives, build.device_type)
    return declare_shards(build.model, build.plan, build.topology, *options)


def _without_plan(build: Build) -> str:
    return "tensor parallelism needs one"


PARALLEL: Feature[ParallelSection] = Feature(
    "parallel", Phase.SHARDS, declare=_declare, parts=_parts, asked=_asked, without_plan=_without_plan
)
