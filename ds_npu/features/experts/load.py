"""Counts of tokens by expert, for the router's bias, DeepSpeed's monitor and ``ds_npu.moe.load_report``.

Counts are kept on the device; the host reads them once per DeepSpeed logging interval (``steps_per_print``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ds_npu.comm.collectives import all_reduce
from ds_npu.config.moe import MoeSection
from ds_npu.features.build import Build
from ds_npu.features.declaration import Change
from ds_npu.features.experts.balance import token_ranks
from ds_npu.features.experts.load_picture import LoadHistory, load_svg
from ds_npu.features.experts.routing import CORRECTION, Collected, collect_ids, collecting, correction_of
from ds_npu.features.modules.expert_layout import expert_layouts
from ds_npu.parallel.expert.capacity import capacity_of
from ds_npu.parallel.expert.routing import histogram
from ds_npu.parallel.runtime.forward_wraps import Level, P, R, wrap_forward
from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.zero_ext.method_wraps import MethodLevel
from ds_npu.zero_ext.training_engine import TrainingEngine

INTERVAL = 10
"""The interval in steps, where DeepSpeed has no logging interval."""
MAX_LOAD, DROPPED = "Train/Experts/{}/max_over_mean_load", "Train/Experts/{}/dropped_fraction"


@dataclass(frozen=True)
class Counts:
    """The counts of one layer in one interval."""

    chosen: list[int]
    """How often each expert was chosen, before any choice was dropped."""
    dropped: int

    @property
    def max_over_mean(self) -> float:
        return max(self.chosen) * len(self.chosen) / max(1, sum(self.chosen))

    @property
    def dropped_fraction(self) -> float:
        return self.dropped / max(1, sum(self.chosen))


Layers = dict[str, Counts]


class ExpertLoad:
    """Counts of the choices of a model's layers in training, since the last ``take``."""

    def __init__(self, experts: Mapping[str, int], factor: float | None, groups: tuple[dist.ProcessGroup, ...]) -> None:
        """``experts`` of all ranks by layer name; their capacity ``factor``; ``groups`` of ranks to sum over."""
        self.experts = dict(experts)
        self.factor = factor
        self._groups = groups
        self._counts: torch.Tensor | None = None

    def parts(self, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        """The part [E + 1] of ``counts`` of each layer: how often each expert was chosen, then dropped choices."""
        parts = torch.split(counts, [each + 1 for each in self.experts.values()])
        return dict(zip(self.experts, parts, strict=True))

    def add(self, collected: Collected) -> None:
        """Add the choices of one forward."""
        for name, calls in collected.ids.items():
            for ids_TK in calls:
                self._add(name, ids_TK)

    def _add(self, name: str, ids_TK: torch.Tensor) -> None:
        experts = self.experts[name]
        if self._counts is None:
            size = sum(self.experts.values()) + len(self.experts)
            self._counts = torch.zeros(size, dtype=torch.int64, device=ids_TK.device)
        chosen_E = histogram(torch.where(ids_TK < 0, experts, ids_TK), experts)
        mine = self.parts(self._counts)[name]
        mine[:experts] += chosen_E
        if self.factor is not None:
            capacity = capacity_of(len(ids_TK), ids_TK.shape[1], experts, self.factor)
            mine[experts] += (chosen_E - capacity).clamp(min=0).sum()

    def take(self) -> torch.Tensor | None:
        """Return the counts of all ranks and reset them; None where no forward was trained."""
        whole, self._counts = self._counts, None
        if whole is not None:
            for group in self._groups:
                whole = all_reduce(whole, group).wait()
        return whole


def load_parts(section: MoeSection, build: Build, computes: bool) -> Iterator[Change]:
    """Count the load; raises ValueError where ``bias_update_rate`` finds no bias."""
    if build.is_pipeline:
        if section.bias_update_rate is not None or section.load_report:
            raise ValueError("ds_npu.moe.bias_update_rate and load_report do not work with a deepspeed.PipelineModule")
        return
    corrections = {}
    if section.bias_update_rate is not None:
        corrections = dict(_corrections(build, section.bias_update_rate))
    if computes or corrections or section.load_report:
        what = "counted for the monitor, the report and biases"
        yield build.installed("load of experts", what, partial(_install, section, build, corrections))


def _corrections(build: Build, rate: float) -> Iterator[tuple[str, tuple[str, torch.Tensor]]]:
    """(name of a layer's experts, (name, copy) of its router's bias); the copy is float32 or wider."""
    layouts = expert_layouts(build.model, build.partial_plan)
    for name, layout in layouts.items():
        found = correction_of(build.model, name, layout.count * _shards(build, name))
        if found is None:
            raise ValueError(
                f"ds_npu.moe.bias_update_rate: found {rate}, and beside {name} in {type(build.model).__name__} no "
                f"buffer {CORRECTION} with a number for each expert, as DeepSeek-V3 has. What to do: leave the key "
                "out; ds_npu.moe.aux_loss balances other models"
            )
        buffer, values = found
        yield name, (buffer, values.to(torch.promote_types(values.dtype, torch.float32), copy=True))
    if not layouts and not build.is_cut_into_stages:
        raise ValueError(f"ds_npu.moe.bias_update_rate: {type(build.model).__name__} has no experts that ds_npu knows")


def _shards(build: Build, name: str) -> int:
    """The number of ranks over which the experts of the module ``name`` are sharded already."""
    weight = dict(build.model.get_submodule(name).named_parameters(recurse=False)).get("down_proj")
    # The layout of experts in a list counts those of all ranks.
    sharding = None if weight is None else placement_of(weight).sharded.get("ep")
    return 1 if sharding is None else build.topology.size("ep")


def _install(
    section: MoeSection, build: Build, corrections: Mapping[str, tuple[str, torch.Tensor]], engine: TrainingEngine
) -> list[str]:
    model = engine.module
    writes = bool(engine.monitor.enabled or section.load_report)
    if not writes and not corrections:
        return []
    layouts = expert_layouts(model, build.partial_plan)
    experts = {name: layout.count * _shards(build, name) for name, layout in layouts.items()}
    if not layouts and not build.is_cut_into_stages:
        return []
    load = ExpertLoad(experts, section.capacity_factor, token_ranks(build).everyone)
    for name in layouts:
        collect_ids(name, model.get_submodule(name))
    wrap_forward(model, partial(_counted, model, load), Level.MODEL)
    # Only layers of this stage; corrections may have been found in the whole model.
    biases = {name: _kept_wide(model, *each) for name, each in corrections.items() if name in layouts}
    # One rank of each stage reports its layers.
    is_first = not any(build.topology.rank(axis) for axis in ("dp", "cp", "tp"))
    report = _Report(load, section.load_report, build.topology.group("pp")) if writes and is_first else None
    after = _AfterSteps(engine, load, biases, section.bias_update_rate or 0.0, writes, report)
    engine.events.before_step(MethodLevel.EXPERT_LOAD, after.before_step)
    engine.events.after_step(MethodLevel.EXPERT_LOAD, after.after_step)
    return []


def _counted(model: nn.Module, load: ExpertLoad, forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    if not (model.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    with collecting() as collected:
        out = forward(*args, **kwargs)
    load.add(collected)
    return out


def _kept_wide(model: nn.Module, name: str, values: torch.Tensor) -> torch.Tensor:
    """Restore the ``values`` and dtype that the buffer ``name`` had before DeepSpeed cast the model; return it.

    A narrow buffer would round away small steps.
    """
    buffer = model.get_buffer(name)
    buffer.data = values.to(buffer.device)
    return buffer


class _AfterSteps:
    """Updates biases after each optimizer step, and writes the report once in an interval."""

    def __init__(
        self,
        engine: TrainingEngine,
        load: ExpertLoad,
        biases: Mapping[str, torch.Tensor],
        rate: float,
        writes: bool,
        report: _Report | None,
    ) -> None:
        self.engine, self.load, self.biases, self.rate = engine, load, biases, rate
        self.writes, self.report = writes, report
        self._skipped = 0
        """The number of steps that DeepSpeed had skipped before this one."""
        self._since: torch.Tensor | None = None

    def before_step(self) -> None:
        self._skipped = self.engine.skipped_steps

    def after_step(self) -> None:
        is_written = self.writes and self.engine.global_steps % (self.engine.steps_per_print() or INTERVAL) == 0
        counts = self.load.take() if self.biases or is_written else None
        if counts is not None:
            if self.engine.skipped_steps == self._skipped:
                for name, bias in self.biases.items():
                    update_bias_(bias, self.load.parts(counts)[name][:-1], self.rate)
            if self.writes:
                self._since = counts if self._since is None else self._since + counts
        if is_written:
            since, self._since = self._since, None
            if self.report is not None:
                self.report.write(self.engine, since)


@torch.no_grad()
def update_bias_(bias_E: torch.Tensor, chosen_E: torch.Tensor, rate: float) -> None:
    """bias += rate * sign(mean load - load), in place; chosen: [E] int64.

    Source: Wang et al. 2024 (auxiliary-loss-free load balancing, arXiv 2408.15664), as DeepSeek-V3 uses it.
    """
    below = (chosen_E.sum() - chosen_E * len(chosen_E)).sign()
    bias_E.add_(below.to(bias_E.dtype), alpha=rate)


class _Report:
    """Writes the counts of all stages, on rank 0.

    One rank of each stage makes a report, and all of these ranks call ``write`` at the same time.
    """

    def __init__(self, load: ExpertLoad, path: str | None, stages: dist.ProcessGroup) -> None:
        self.load, self.path, self._stages = load, None if path is None else Path(path), stages
        self.history = LoadHistory()
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, engine: TrainingEngine, counts: torch.Tensor | None) -> None:
        """Write the counts of all stages.

        ``counts``: those of this stage; None where it has no layers, or no forward was trained.
        """
        layers = self._of_stages({} if counts is None else self._layers(counts))
        if dist.get_rank() != 0 or not layers:
            return
        if engine.monitor.enabled:
            at = engine.global_samples
            events = [(MAX_LOAD.format(name), each.max_over_mean, at) for name, each in layers.items()]
            if self.load.factor is not None:
                events += [(DROPPED.format(name), each.dropped_fraction, at) for name, each in layers.items()]
            engine.monitor.write_events(events)
        if self.path is not None:
            self.history.add(engine.global_steps, {name: each.chosen for name, each in layers.items()})
            self.path.write_text(load_svg(self.history), encoding="utf-8")

    def _layers(self, counts: torch.Tensor) -> Layers:
        # The host waits for the device, once in an interval.
        numbers = {name: each.tolist() for name, each in self.load.parts(counts.cpu()).items()}
        return {name.removesuffix(".experts"): Counts(each[:-1], each[-1]) for name, each in numbers.items()}

    def _of_stages(self, mine: Layers) -> Layers:
        """The counts of the layers of all stages, sorted by their numbers."""
        if dist.get_world_size(self._stages) == 1:
            return mine
        found: list[Layers] = [{} for _ in range(dist.get_world_size(self._stages))]
        dist.all_gather_object(found, mine, group=self._stages)
        layers = {name: each for stage in found for name, each in stage.items()}
        return dict(sorted(layers.items(), key=lambda each: [int(part) for part in re.findall(r"\d+", each[0])]))
