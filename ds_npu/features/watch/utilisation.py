"""``ds_npu.watch.mfu``: the products of one step are counted, and every step is held against the machine's peak."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from ds_npu.features.build import Build
from ds_npu.features.recorded_calls.module_calls import ModuleCalls
from ds_npu.features.recorded_calls.observed_step import ObservedStep
from ds_npu.features.watch.counted_flop import Flop, FlopCounter
from ds_npu.features.watch.throughput import ids_of, ranks_of_tokens, tells_tokens
from ds_npu.log import logger
from ds_npu.models.attributes import attribute
from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.zero_ext.method_wraps import MethodLevel
from ds_npu.zero_ext.step_flop import StepFlop
from ds_npu.zero_ext.training_engine import TrainingEngine

COUNTED_STEP = 2
"""The optimizer step whose products are counted: in the first one there may be more (probes, compilation)."""
PRINTED_EVERY = 10
"""Steps between two lines of the log, where DeepSpeed's ``steps_per_print`` is left out."""
GROUPED_DIMS = 3
"""Dims of the weights of grouped experts, of which a token meets a few."""


class CountedStep:
    """Counts the products of ``engine`` and its tokens from now until ``finish``, but not the optimizer's."""

    def __init__(self, engine: TrainingEngine, build: Build) -> None:
        self.tokens = 0
        """Tokens of this rank's micro-batches."""
        calls = ModuleCalls(engine.module)
        self._counter = FlopCounter(calls, replicated_shares(engine.module, build))
        self._step = ObservedStep(engine, calls, self._counter)
        tells = tells_tokens(engine.module)

        def count(module: nn.Module, args: object, kwargs: object) -> None:
            ids = ids_of((kwargs, args)) if tells() and module.training and torch.is_grad_enabled() else None
            self.tokens += 0 if ids is None else ids.shape[0] * ids.shape[1]

        self._hook = engine.module.register_forward_pre_hook(count, with_kwargs=True)

    def finish(self) -> Flop:
        """Stop counting; the FLOP of this rank."""
        self._step.finish()
        self._hook.remove()
        return self._counter.flop


def replicated_shares(model: nn.Module, build: Build) -> dict[str, float]:
    """For each module whose products several tensor ranks compute alike, the part of them that counts on this rank."""
    ranks = build.topology.size("tp")
    if ranks == 1 or build.sequence_parallel:
        return {}
    found = {}
    for name, module in model.named_modules():
        weights = list(module.parameters(recurse=False))
        if weights and all("tp" in placement_of(each).copied for each in weights):
            found[name] = 1 / ranks
    return found


def step_flop(engine: TrainingEngine, build: Build, flop: Flop, tokens: int) -> StepFlop:
    """Sum the FLOP of a step over all ranks, which all call it."""
    topology = build.topology
    world = topology.degrees.world_size
    stages = topology.size("pp")
    weights = sum(map(_whole_elements, engine.module.parameters())) * stages / world
    tells = tokens * ranks_of_tokens(build) / world
    sums = torch.tensor([flop.model, flop.executed, weights, tells], dtype=torch.float64, device=engine.device)
    if sums.device.type != "cpu":
        sums = sums.float()  # NPUs have no float64.
    dist.all_reduce(sums)
    model, executed, parameters, all_tokens = sums.tolist()
    is_plain = all(each.requires_grad and each.dim() < GROUPED_DIMS for each in engine.module.parameters())
    six_nd = 6 * parameters * all_tokens if is_plain and all_tokens else None
    return StepFlop(model, executed, six_nd, build.machine.peak * world)


def _whole_elements(weight: nn.Parameter) -> int:
    """The elements of a weight in the plain model."""
    shape = placement_of(weight).shape
    return math.prod(shape) if shape else attribute(weight, "ds_numel", int) or weight.numel()


@dataclass
class Utilisation:
    """Counts the FLOP of one step of ``engine``, and prints MFU and HFU of later steps."""

    engine: TrainingEngine
    build: Build
    steps: int = 0
    """Optimizer steps that this process has ended."""
    counted: CountedStep | None = None
    found: StepFlop | None = None
    began: float | None = None
    durations: list[float] = field(default_factory=list)
    """Seconds of the steps since the last line."""

    def after_step(self) -> None:
        """Begin or end to count; note how long the step has taken."""
        self.steps += 1
        now = time.perf_counter()
        if self.steps == COUNTED_STEP - 1:
            self.counted = CountedStep(self.engine, self.build)
        elif self.counted is not None:
            flop = self.counted.finish()
            tokens = self.counted.tokens
            self.counted = None
            self.found = step_flop(self.engine, self.build, flop, tokens)
            self._say_counted(self.found)
            now = time.perf_counter()
        elif self.began is not None:
            self.durations.append(now - self.began)
            # The counted step was slow: the monitor, which writes behind this, begins with the one after it.
            self.engine.step_flop = self.found
        self.began = now
        every = self.engine.steps_per_print() or PRINTED_EVERY
        if self.durations and self.engine.global_steps % every == 0:
            self._say(statistics.median(self.durations))
            self.durations.clear()

    def _say_counted(self, flop: StepFlop) -> None:
        if dist.get_rank() == 0:
            machine = self.build.machine
            six_nd = "" if flop.six_nd is None else f"; 6 x parameters x tokens are {flop.six_nd:.4g}"
            logger().info(
                "step %d: %.4g FLOP of the model, %.4g executed%s. MFU and HFU are shares of %d x %.4g FLOP/s, the "
                "peak of %s (%s)",
                *(self.engine.global_steps, flop.model, flop.executed, six_nd, self.build.topology.degrees.world_size),
                *(machine.peak, machine.name, dict(machine.evidence)["peak"]),
            )

    def _say(self, seconds: float) -> None:
        flop = self.engine.step_flop
        if flop is not None and dist.get_rank() == 0:
            mfu = 100 * flop.mfu(seconds)
            hfu = 100 * flop.hfu(seconds)
            logger().info(
                "step %d: MFU %.3g %%, HFU %.3g %%, %.4g s a step", self.engine.global_steps, mfu, hfu, seconds
            )


def tell_utilisation(build: Build, engine: TrainingEngine) -> None:
    """Count the FLOP of one step of ``engine``, and print MFU and HFU of the others.

    Raises ValueError under DeepCompile, whose graphs run no operators one by one.
    """
    if engine.is_deepcompile_enabled():
        raise ValueError(
            "ds_npu.watch.mfu: found true beside compile.deepcompile, whose compiled step shows no operators to count. "
            "What to do: leave one of them out"
        )
    engine.events.after_step(MethodLevel.THROUGHPUT, Utilisation(engine, build).after_step)
