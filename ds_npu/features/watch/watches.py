"""``ds_npu.watch``: checks of a run while it trains, step time and tokens per second in DeepSpeed's monitor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_npu.config.watch import WatchSection
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change
from ds_npu.features.watch.not_finite import stop_at_not_finite
from ds_npu.features.watch.stalls import StallWatch, watch_for_stalls
from ds_npu.parallel.pipeline.pass_through import BORDER_STATES, stages_in
from ds_npu.parallel.runtime.micro_batch import running
from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method
from ds_npu.zero_ext.training_engine import TrainingEngine

FOLDER = "not_finite"
"""The folder, in the run's own, of the file that ``watch.finite`` true writes."""
Event = tuple[str, float, int]
STEP_TIME, TOKENS = "Train/Samples/step_time_ms", "Train/Samples/tokens_per_second"


def _parts(section: WatchSection, build: Build) -> Iterable[Change]:
    def part(name: str, what: str, install: Callable[[TrainingEngine], object]) -> Change:
        return build.installed(name, what, partial(_quietly, install))

    factor = section.stall_factor
    what = f"where each rank stands when no step ends for {factor} median steps" if factor else "what other watches see"
    yield part("a look after steps", what, partial(_look_after_steps, factor))
    yield part("events of the monitor", "step time and tokens per second", partial(write_throughput, build))
    if section.finite:
        folder = section.finite if isinstance(section.finite, str) else FOLDER
        stop = partial(stop_at_not_finite, folder=folder, is_pipeline=build.is_pipeline)
        yield part("an end at what is not finite", "the first wrong module of a loss or gradient, in a file", stop)


def _quietly(install: Callable[[TrainingEngine], object], engine: TrainingEngine) -> list[str]:
    install(engine)
    return []


def _look_after_steps(factor: int, engine: TrainingEngine) -> None:
    watch = StallWatch(factor, f"rank {dist.get_rank()} of {dist.get_world_size()}")
    watch_for_stalls(engine, watch, engine.joint_calls.say_where if factor else lambda: None)


@dataclass
class Throughput:
    """Counters of rank 0 between two optimizer steps."""

    ranks: int
    """The number of ranks with tokens of their own."""
    samples: int = 0
    """DeepSpeed's count of samples at the last event."""
    tokens: int = 0
    """Tokens of this rank since that event."""
    began: float | None = None

    def count(self, arguments: object) -> None:
        """Count the tokens of a micro-batch: its first argument of integers with two dims or more."""
        ids = next((leaf for leaf in tree_leaves(arguments) if _is_ids(leaf)), None)
        self.tokens += 0 if ids is None else ids.shape[0] * ids.shape[1]

    def events(self, now: float, samples: int) -> list[Event]:
        """The events of the step that has ended at ``now``, in seconds; none where no step has, or it began unseen."""
        if samples == self.samples:
            return []
        events: list[Event] = []
        if self.began is not None:
            seconds = now - self.began
            events.append((STEP_TIME, 1000 * seconds, samples))
            if self.tokens:
                events.append((TOKENS, self.tokens * self.ranks / seconds, samples))
        self.samples, self.tokens, self.began = samples, 0, now
        return events


def _is_ids(leaf: object) -> bool:
    return (
        isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and not leaf.is_floating_point() and leaf.dtype != torch.bool
    )


def write_throughput(build: Build, engine: TrainingEngine) -> None:
    """Add the events to those that ``engine``, a DeepSpeed engine, writes of each step."""
    if not engine.monitor.enabled or dist.get_rank() != 0:
        return
    ranks = build.topology.size(*(("dp",) if build.shards_sequences else ("dp", "cp")))
    throughput, own = Throughput(ranks, engine.global_samples), stages_in(engine.module)

    def count(module: nn.Module, args: object, kwargs: object) -> None:
        running_stage = BORDER_STATES.of(running())
        if own and (running_stage is None or running_stage.stage != own[0]):
            return  # Every stage of the rank is given each micro-batch; only one stage counts it.
        if module.training and torch.is_grad_enabled():
            throughput.count((kwargs, args))
        elif not module.training:
            throughput.began = None  # The next step's time would have the evaluation in it.

    def write_events(write: Callable[[Sequence[Event]], object], events: Sequence[Event]) -> None:
        write([*events, *throughput.events(time.perf_counter(), engine.global_samples)])

    engine.module.register_forward_pre_hook(count, with_kwargs=True)
    wrap_method(engine.monitor, "write_events", write_events, MethodLevel.THROUGHPUT)


WATCH: Feature[WatchSection] = Feature("watch", parts=_parts)
