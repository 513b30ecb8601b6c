"""A model as a planned world would hold it, on the meta device: its changes and placements, and its pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ds_npu.checkpoint.loading import meta_model
from ds_npu.cli.planned_overlap import overlap_lines
from ds_npu.config.check import Checked
from ds_npu.config.problems import Config, printable
from ds_npu.config.whole_matrices import is_muon
from ds_npu.config.zero_buckets import stated_bucket_limits, why_not_in_buckets
from ds_npu.engine.pipeline.planned_stages import PlannedStages, planned_stages
from ds_npu.engine.placements import complete_placements
from ds_npu.features.build import Build
from ds_npu.features.declaration import table
from ds_npu.features.driver import apply_features, values_in
from ds_npu.log import aligned
from ds_npu.models import names
from ds_npu.models.attributes import attributes
from ds_npu.models.hugging_face_model import setting
from ds_npu.models.zero3 import OURS
from ds_npu.parallel.pipeline.schedule import Schedule
from ds_npu.parallel.pipeline.timeline import Costs, Timeline, timeline
from ds_npu.parallel.runtime.forward_wraps import wraps_of
from ds_npu.parallel.runtime.marks import marks_of
from ds_npu.parallel.runtime.placement import Placement, placement_of
from ds_npu.parallel.whole_matrices.holdings import Partition, contiguous
from ds_npu.planner.matrix_report import matrix_lines
from ds_npu.planner.parameter_bytes import bytes_of_a_parameter, saved_bytes_of_a_parameter
from ds_npu.planner.schedule_picture import schedule_svg, schedule_text
from ds_npu.topology.degrees import Axis, Degrees
from ds_npu.topology.machine import Machine
from ds_npu.topology.topology import PlannedTopology
from ds_npu.zero_ext.bucket_plan import bucketed_runs
from ds_npu.zero_ext.matrix_holdings import mark_matrices, matrix_weights

ASSUMED = (
    "Assumed: NPUs whose kernels pass their checks, and weights that agree with their roles (the probe was not run)."
)
MOST_LAYERS = 1000
WIDEST = 160
"""Columns of the schedule in text."""
MOST_ACTIONS = 100_000
"""Actions of the largest schedule that is drawn."""


@dataclass(frozen=True)
class Shown:
    """Whether the long tables are printed, and the machine and the length of samples that estimates assume."""

    changes: bool
    parameters: bool
    machine: Machine
    length: int | None
    """Tokens of a sample; None: not known."""


def lines(path: Path, ds_config: Config, checked: Checked, shown: Shown) -> Iterator[str]:
    """A summary of rank 0's part of the model of the config at ``path``, and the tables that are asked for.

    Raises ValueError for a model that a feature refuses.
    """
    model = model_without_weights(path)
    if isinstance(model, str):
        yield from ("", f"What ds_npu changes of the model is not known: {printable(model)}")
        return
    if is_muon(ds_config):
        mark_matrices(model, ds_config)
    topology = PlannedTopology(checked.degrees)
    build = Build(topology, model, checked.config.plan, "npu", is_planned=True)
    declarations = apply_features(values_in(checked.config), build)
    complete_placements(model, topology, ("pp",) if build.is_cut_into_stages else (), checked.zero_stage or 0)
    yield from ("", *summary(model, ds_config, checked))
    yield from overlap_lines(model, ds_config, checked, shown.machine, shown.length)
    yield from muon_lines(model, ds_config, checked, shown.machine)
    if shown.changes:
        yield from ("", f"What ds_npu changes for {type(model).__name__}, in this order")
        yield from (f"  {line}" for line in (*(list(table(declarations)) or ["nothing"]), *build.notes))
        yield from ("", f"What ds_npu leaves on {type(model).__name__}", *(f"  {line}" for line in left_on(model)))
    if shown.parameters:
        rows = (*placements(model, checked.degrees), ASSUMED)
        yield from ("", "Parameters of rank 0", *(f"  {line}" for line in rows))


def muon_lines(model: nn.Module, ds_config: Config, checked: Checked, machine: Machine) -> Iterator[str]:
    """Lines about the matrices of ``model``; none with other optimizers."""
    if not is_muon(ds_config):
        return
    weights = matrix_weights(model)
    coefficients = checked.config.muon.coefficients
    stage = checked.zero_stage or 0
    partition = _partition_of(ds_config)
    yield from ("", *matrix_lines(weights, checked.degrees, stage, coefficients, machine, partition))


def _partition_of(ds_config: Config) -> Partition:
    if why_not_in_buckets(ds_config) is not None:
        return contiguous
    return partial(bucketed_runs, stated_bucket_limits(ds_config))


def summary(model: nn.Module, ds_config: Config, checked: Checked) -> Iterator[str]:
    """Sizes of rank 0's part of ``model``, before and after ZeRO, and where more is told."""
    parameters = [(each.numel(), placement_of(each)) for each in model.parameters()]
    held = sum(count for count, _ in parameters)
    whole = sum(math.prod(placement.shape) for _, placement in parameters)
    yield f"{type(model).__name__}: {whole:,} parameters, of which rank 0 holds {held:,} before ZeRO shards them"
    stage = checked.zero_stage or 0
    size = sum(count * bytes_of_a_parameter(ds_config, stage, _copies(each, checked)) for count, each in parameters)
    of = f"weights, gradients and AdamW's state, before activations (ZeRO {stage})"
    yield f"  Memory of rank 0: {size / 2**30:,.1f} GiB of {of}"
    yield from _memory_for_checkpoints(parameters, ds_config, checked)
    yield "  Time and memory of a step: ds_npu predict. More about the model: --changes, --parameters"


def _memory_for_checkpoints(
    parameters: Sequence[tuple[int, Placement]], ds_config: Config, checked: Checked
) -> Iterator[str]:
    """Lines about host memory for asynchronous saves and for copies on peers; none where both are off."""
    stage = checked.zero_stage or 0
    section = checked.config.checkpoint
    saved = sum(
        count * saved_bytes_of_a_parameter(ds_config, stage, _copies(each, checked)) for count, each in parameters
    )
    gib = saved / 2**30
    if section.asynchronous:
        yield f"  Pinned host memory of rank 0 for asynchronous saves: {gib:,.1f} GiB, as large as its files (AdamW)"
    if section.peer_copies is not None:
        kept = f"{gib:,.1f} GiB pinned and {2 * gib:,.1f} GiB, twice that while a copy is on its way"
        yield f"  Host memory of rank 0 for copies of checkpoints: {kept}"


def _copies(placement: Placement, checked: Checked) -> int:
    """The number of ranks over which ZeRO shards a parameter: those along its ``data_axes``."""
    return math.prod(checked.degrees.size(axis) for axis in placement.data_axes)


def model_without_weights(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module | str:
    """The model of the Hugging Face config at ``path`` without weights, in training mode; or why there is none."""
    try:
        config: Any = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        layers = setting(config.get_text_config(), "num_hidden_layers", int) or 0
        if layers > MOST_LAYERS:
            return f"{layers:,} layers, more than {MOST_LAYERS:,}"
        # With a dtype, no checkpoint has to tell it.
        model: nn.Module = meta_model(auto_class_of(config), path, dtype, trust_remote_code=False, **options).train()
    except Exception as error:  # Any: the values of a config may be anything, and transformers computes with them.
        return f"transformers cannot make it ({type(error).__name__}: {error})"
    return model


def auto_class_of(config: Any) -> Any:
    """The Auto class of transformers that makes a model of ``config`` to be trained."""
    autos = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    return next((auto for auto in autos if type(config) in auto._model_mapping), transformers.AutoModel)


def left_on(model: nn.Module) -> Iterator[str]:
    """A table of what ds_npu keeps on the model.

    These are records on modules, wraps of forwards, and attributes of parameters.
    """
    found: list[tuple[str, str, str, str]] = []
    for name, module in model.named_modules():
        found += [("record", mark, type(value).__name__, name) for mark, value in marks_of(module).items()]
        if levels := [wrap.level.name for wrap in wraps_of(module)]:
            found.append(("forward", "wraps, outermost first", ", ".join(levels), name))
    for name, parameter in model.named_parameters():
        for mark, value in attributes(parameter, object).items():
            if mark.startswith(OURS):
                words = mark.removeprefix(f"{OURS}_").replace("_", " ")
                found.append(("parameter", words, type(value).__name__, name))
    groups: dict[tuple[str, ...], list[str]] = {}
    for *row, name in found:
        groups.setdefault((*row, names.generic(name)), []).append(name)
    rows = [(*row[:3], names.abbreviated(parts) or "the model") for row, parts in groups.items()]
    yield from aligned(rows) if rows else ["nothing"]


def placements(model: nn.Module, degrees: Degrees) -> Iterator[str]:
    """A table of parameters, and below it the numbers of their elements.

    Parameters that differ only in indices share a row.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    whole = held = 0
    for parameter in model.parameters():
        placement = placement_of(parameter)
        whole = whole + math.prod(placement.shape)
        held = held + parameter.numel()
        row = (names.generic(placement.name), str(list(placement.shape)), *_along(placement, degrees))
        groups.setdefault(row, []).append(placement.name)
    rows = [("parameter", "whole shape", "held by this rank", "same values over", "gradient")]
    yield from aligned([*rows, *((names.abbreviated(parts), *row[1:]) for row, parts in groups.items())])
    yield f"{held:,} of {whole:,} numbers, before ZeRO shards them"


def _along(placement: Placement, degrees: Degrees) -> tuple[str, str, str]:
    def ranks(axes: Iterable[Axis]) -> str:
        return " x ".join(axis for axis in axes if degrees.size(axis) > 1) or "no other rank"

    held = [
        f"dim {each.dim} over {axis}: {each.length(0):,} of {each.size:,}" for axis, each in placement.sharded.items()
    ]
    partial = "".join(f"summed over {axis}, then " for axis in placement.partial)
    same = [axis for axis in placement.view if axis in (*placement.data_axes, *placement.copied)]
    return ", ".join(held) or "all", ranks(same), f"{partial}reduced over {ranks(placement.data_axes)}"


def pipeline_lines(path: Path, checked: Checked, svg: Path | None) -> Iterator[str]:
    """Lines about the pipeline of the model of the config at ``path``; none with one pipeline rank.

    Writes the schedule's picture next to ``svg``, the file of the layout. Raises ValueError where the model, its
    division into stages or the file of the schedule is refused.
    """
    model = model_without_weights(path) if checked.degrees.pp > 1 else ""
    if isinstance(model, str):
        return
    planned = planned_stages(model, checked.config, checked.degrees)
    layout = planned.layout
    count, how = micro_batches_of(checked)
    yield from ("", f"Pipeline over {layout.ranks} ranks, {count:,} micro-batches ({how})")
    actions = 3 * count * layout.stages
    if actions > MOST_ACTIONS:
        yield f"  The schedule has up to {actions:,} actions, and is shown where it has {MOST_ACTIONS:,} at most."
        return
    schedule = layout.make(count)
    # All stages of a rank together take 1 for each of F, I and W.
    share = layout.ranks / layout.stages
    run = timeline(schedule, Costs(share, share, share))
    text = schedule_text(layout.name, run)
    picture = (each if len(each) <= WIDEST else f"{each[: WIDEST - 4]} ..." for each in text.splitlines())
    yield from (f"  {line}" for line in (*picture, *bubble_lines(run, planned.loads), *pair_lines(schedule)))
    yield from ("", "Pipeline ranks", *(f"  {line}" for line in rank_table(planned, schedule)))
    if svg is not None:
        file = svg.with_name(f"{svg.stem}_schedule{svg.suffix}")
        file.write_text(schedule_svg(layout.name, run), encoding="utf-8")
        yield f"  The schedule is drawn in {printable(str(file))}"


def micro_batches_of(checked: Checked) -> tuple[int, str]:
    """The number of micro-batches of a batch, and what decides it."""
    asked = checked.config.pipeline.micro_batches
    samples = checked.batch.micro
    if asked and samples and asked > samples:
        return samples, f"the samples of a batch, of which ds_npu.pipeline.micro_batches {asked:,} would need more"
    if asked:
        return asked, "ds_npu.pipeline.micro_batches"
    if samples:
        return samples, "one for each sample of train_micro_batch_size_per_gpu"
    return 4 * checked.degrees.pp, "assumed: the config says neither pipeline.micro_batches nor a micro-batch size"


def bubble_lines(run: Timeline, loads: Sequence[float]) -> Iterator[str]:
    """The bubble as a share of the makespan: once as if all stages cost the same, once with the cost of each."""
    alike = run.bubble / run.makespan if run.makespan else 0.0
    own = timeline(run.schedule, Costs(stages=loads))
    yield (
        f"Bubble: {alike:.1%} of the makespan at most, between a rank's first and last action; with what ranks wait "
        f"before and after, {mean_idle(run):.1%} on average (F = I = W, and R; stages alike; messages take no time)"
    )
    yield (
        f"With the cost of each stage (matrix products of its blocks and the head; attention not counted): "
        f"{mean_idle(own):.1%} on average"
    )


def pair_lines(schedule: Schedule) -> Iterator[str]:
    """How many forwards run together with a backward; nothing where none do."""
    if schedule.paired:
        yield (
            f"Together: {len(schedule.paired):,} of {schedule.stages * schedule.micro_batches:,} forwards run beside a "
            "backward of another micro-batch of their rank"
        )


def mean_idle(run: Timeline) -> float:
    """The part of the makespan in which a rank does nothing, on average over the ranks."""
    ranks = range(len(run.schedule.rows))
    return sum(map(run.idle, ranks)) / len(ranks)


def rank_table(planned: PlannedStages, schedule: Schedule) -> Iterator[str]:
    """A row for each pipeline rank; other ranks of the same stages hold as much."""
    layout = planned.layout
    own = timeline(schedule, Costs(stages=planned.loads))
    rows: list[tuple[str, ...]] = [("rank", "stages", "layers", "parameters", "peak activations", "work", "waits")]
    heaviest = max(map(own.work, range(layout.ranks)))
    for rank in range(layout.ranks):
        stages = layout.own(rank)
        blocks = [block for stage in stages for block in planned.blocks[stage]]
        layers = " + ".join(str(len(planned.blocks[stage])) for stage in stages)
        rows.append(
            (
                str(rank),
                ", ".join(map(str, stages)),
                f"{layers} ({names.abbreviated(blocks)})" if blocks else layers,
                f"{planned.held[rank]:,}",
                str(schedule.peak_activations[rank]),
                f"{own.work(rank) / heaviest:.0%}" if heaviest else "-",
                f"{own.idle(rank):.0%}",
            )
        )
    yield from aligned(rows)
    of = "a micro-batch of one stage" + (f" (1/{layout.chunks} of a rank's layers)" if layout.chunks > 1 else "")
    again = " from its second forward (R) on; of the others inputs are kept" if layout.recomputes else ""
    yield f"Parameters: before ZeRO shards them. Peak activations: of {of}{again}. Work: of the slowest rank's."
