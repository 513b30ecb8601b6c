"""``ds_npu.watch``: checks of a run while it trains, step time and tokens per second in DeepSpeed's monitor."""

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
from ds_npu.features.watch.utilisation import tell_utilisation
from ds_npu.zero_ext.method_wraps import MethodLevel
from ds_npu.zero_ext.training_engine import TrainingEngine

FOLDER = "not_finite"
"""The folder, in the run's own, of the file that ``watch.finite`` true writes."""


def _parts(section: WatchSection, build: Build) -> Iterable[Change]:
    def part(name: str, what: str, install: Callable[[TrainingEngine], object]) -> Change:
        return build.installed(name, what, partial(_quietly, install))

    factor = section.stall_factor
    what = f"where each rank stands when no step ends for {factor} median steps" if factor else "what other watches see"
    yield part("a look after steps", what, partial(_look_after_steps, factor))
    yield part("events of the monitor", "step time and tokens per second", partial(write_throughput, build))
    if section.mfu:
        yield part("a count of FLOP", "the share of the peak that each step reaches", partial(tell_utilisation, build))
    if section.finite:
        folder = section.finite if isinstance(section.finite, str) else FOLDER
        stop = partial(stop_at_not_finite, folder=folder, is_pipeline=build.is_pipeline)
        yield part("an end at what is not finite", "the first wrong module of a loss or gradient, in a file", stop)


def _quietly(install: Callable[[TrainingEngine], object], engine: TrainingEngine) -> list[str]:
    install(engine)
    return []


def _look_after_steps(factor: int, engine: TrainingEngine) -> None:
    watch = StallWatch(factor, f"rank {dist.get_rank()} of {dist.get_world_size()}")
    watch_for_stalls(engine, watch, engine.joint_calls.say_where if factor else _say_nothing)
    engine.events.after_destroy(MethodLevel.THROUGHPUT, watch.end)


def _say_nothing() -> None:
    """Stands for what a watch without reports tells other ranks."""


WATCH: Feature[WatchSection] = Feature("watch", parts=_parts)
