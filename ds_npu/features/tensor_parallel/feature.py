"""``ds_npu.parallel``: shards the weights of a build's model over the tensor ranks."""

from __future__ import annotations

from ds_npu.config.parallel import ParallelSection
from ds_npu.features.build import Build, Slot
from ds_npu.features.feature import Feature
from ds_npu.features.tensor_parallel.probe import check_sharding
from ds_npu.features.tensor_parallel.sharded_model import shard_model, sharded_model_of
from ds_npu.parallel.tensor.randomness import align_generators


def _apply(section: ParallelSection, build: Build) -> None:
    if section.tensor == 1:
        return
    align_generators(build.topology, build.device_type)
    if sharded_model_of(build.model) is None:
        if section.probe:
            check_sharding(build.model, build.plan, build.topology, section.sequence_parallel)
        options = (section.sequence_parallel, build.slots.get(Slot.LINEAR), build.device_type)
        shard_model(build.model, build.plan, build.topology, *options)


PARALLEL: Feature[ParallelSection] = Feature("parallel", apply=_apply)
