"""``ds_npu.watch``: checks of a run while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch.distributed as dist

from ds_npu.config.watch import WatchSection
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change
from ds_npu.features.watch.not_finite import stop_at_not_finite
from ds_npu.features.watch.stalls import StallWatch, watch_for_stalls
from ds_npu.features.watch.throughput import write_throughput
from ds_npu.zero_ext.training_engine import TrainingEngine


def _parts(section: WatchSection, build: Build) -> Iterable[Change]:
    def part(name: str, what: str, install: Callable[[TrainingEngine], object]) -> Change:
        return Change("provides", name, what, partial(build.when_built.append, partial(_quietly, install)))

    factor = section.stall_factor
    what = f"where each rank stands when no step ends for {factor} median steps" if factor else "what other watches see"
    yield part("a look after steps", what, partial(_look_after_steps, factor))
    yield part("events of the monitor", "step time and tokens per second", partial(_write_throughput, build))
    if section.finite:
        stop = partial(stop_at_not_finite, is_pipeline=build.is_pipeline)
        yield part("an end at what is not finite", "step, rank and layer of a loss or gradient", stop)


def _quietly(install: Callable[[TrainingEngine], object], engine: TrainingEngine) -> list[str]:
    install(engine)
    return []


def _look_after_steps(factor: int, engine: TrainingEngine) -> None:
    watch = StallWatch(factor, f"rank {dist.get_rank()} of {dist.get_world_size()}")
    watch_for_stalls(engine, watch, engine.joint_calls.say_where if factor else lambda: None)


def _write_throughput(build: Build, engine: TrainingEngine) -> None:
    if engine.monitor.enabled and dist.get_rank() == 0:
        axes = ("dp",) if build.shards_sequences else ("dp", "cp")
        write_throughput(engine, build.topology.size(*axes))


WATCH: Feature[WatchSection] = Feature("watch", parts=_parts)
