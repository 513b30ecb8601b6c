"""Step time, tokens per second, MFU and HFU of each step, in DeepSpeed's monitor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_npu.features.build import Build
from ds_npu.parallel.pipeline.pass_through import BORDER_STATES, stages_in
from ds_npu.parallel.runtime.micro_batch import running
from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method
from ds_npu.zero_ext.step_flop import StepFlop
from ds_npu.zero_ext.training_engine import TrainingEngine

Event = tuple[str, float, int]
STEP_TIME, TOKENS = "Train/Samples/step_time_ms", "Train/Samples/tokens_per_second"
MFU, HFU = "Train/Samples/mfu", "Train/Samples/hfu"


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
        ids = ids_of(arguments)
        self.tokens += 0 if ids is None else ids.shape[0] * ids.shape[1]

    def events(self, now: float, samples: int, flop: StepFlop | None = None) -> list[Event]:
        """The events of the step that has ended at ``now``, in seconds; none where no step has, or it began unseen."""
        if samples == self.samples:
            return []
        events: list[Event] = []
        if self.began is not None:
            seconds = now - self.began
            events.append((STEP_TIME, 1000 * seconds, samples))
            if self.tokens:
                events.append((TOKENS, self.tokens * self.ranks / seconds, samples))
            if flop is not None:
                events += [(MFU, flop.mfu(seconds), samples), (HFU, flop.hfu(seconds), samples)]
        self.samples = samples
        self.tokens = 0
        self.began = now
        return events


def ids_of(arguments: object) -> torch.Tensor | None:
    """The first argument of integers with two dims or more: tokens [B, S]."""
    return next((leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and _is_ids(leaf)), None)


def ranks_of_tokens(build: Build) -> int:
    """The number of ranks with tokens of their own."""
    return build.topology.size(*(("dp",) if build.shards_sequences else ("dp", "cp")))


def tells_tokens(model: nn.Module) -> Callable[[], bool]:
    """A function that says whether the tokens of the running forward count.

    Of several stages of a rank, only the first counts them.
    """
    own = stages_in(model)

    def tells() -> bool:
        running_stage = BORDER_STATES.of(running())
        return not own or (running_stage is not None and running_stage.stage == own[0])

    return tells


def _is_ids(leaf: object) -> bool:
    return (
        isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and not leaf.is_floating_point() and leaf.dtype != torch.bool
    )


def write_throughput(build: Build, engine: TrainingEngine) -> None:
    """Add the events of a Throughput to those that ``engine``, a DeepSpeed engine, writes of each step."""
    if not engine.monitor.enabled or dist.get_rank() != 0:
        return
    throughput = Throughput(ranks_of_tokens(build), engine.global_samples)
    tells = tells_tokens(engine.module)

    def count(module: nn.Module, args: object, kwargs: object) -> None:
        if not tells():
            return
        if module.training and torch.is_grad_enabled():
            throughput.count((kwargs, args))
        elif not module.training:
            throughput.began = None  # The next step's time would have the evaluation in it.

    def write_events(write: Callable[[Sequence[Event]], object], events: Sequence[Event]) -> None:
        write([*events, *throughput.events(time.perf_counter(), engine.global_samples, engine.step_flop)])

    engine.module.register_forward_pre_hook(count, with_kwargs=True)
    wrap_method(engine.monitor, "write_events", write_events, MethodLevel.THROUGHPUT)
