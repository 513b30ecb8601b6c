"""The pipeline of a planned model: its schedule as a picture, its bubble, and what each of its ranks holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ds_npu.cli.planned_model import model_without_weights
from ds_npu.config.check import Checked
from ds_npu.config.problems import printable
from ds_npu.engine.pipeline.planned_stages import PlannedStages, planned_stages
from ds_npu.models import names
from ds_npu.parallel.pipeline.schedule import Schedule
from ds_npu.parallel.pipeline.timeline import Costs, Timeline, timeline
from ds_npu.planner.schedule_picture import schedule_svg, schedule_text

WIDEST = 160
"""Columns of the schedule in text."""
MOST_ACTIONS = 100_000
"""Actions of the largest schedule that is drawn."""

Row = tuple[str, ...]


def pipeline_lines(path: Path, checked: Checked, svg: Path | None) -> Iterator[str]:
    """Lines about the pipeline of the model of the config at ``path``; none with one pipeline rank.

    Writes the schedule's picture to ``svg``. Raises ValueError for a model, a division or a file of a schedule that is
    refused.
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
    parts = (*picture(layout.name, run), *bubble_lines(run, planned.loads), *pair_lines(schedule))
    yield from (f"  {line}" for line in parts)
    yield from ("", "Pipeline ranks", *(f"  {line}" for line in rank_table(planned, schedule)))
    if svg is not None:
        svg.write_text(schedule_svg(layout.name, run), encoding="utf-8")
        yield f"  The schedule is drawn in {printable(str(svg))}"


def schedule_file(svg: Path) -> Path:
    """The file of the schedule's picture, next to ``svg``, which has the layout."""
    return svg.with_name(f"{svg.stem}_schedule{svg.suffix}")


def micro_batches_of(checked: Checked) -> tuple[int, str]:
    """The number of micro-batches of a batch, and what decides it."""
    asked, samples = checked.config.pipeline.micro_batches, checked.batch.micro
    if asked and samples and asked > samples:
        return samples, f"the samples of a batch, of which ds_npu.pipeline.micro_batches {asked:,} would need more"
    if asked:
        return asked, "ds_npu.pipeline.micro_batches"
    if samples:
        return samples, "one for each sample of train_micro_batch_size_per_gpu"
    return 4 * checked.degrees.pp, "assumed: the config says neither pipeline.micro_batches nor a micro-batch size"


def picture(name: str, run: Timeline) -> Iterator[str]:
    """The schedule in text; long lines are cut."""
    for line in schedule_text(name, run).splitlines():
        yield line if len(line) <= WIDEST else f"{line[: WIDEST - 4]} ..."


def bubble_lines(run: Timeline, loads: Sequence[float]) -> Iterator[str]:
    """The bubble as a share of the makespan: where all stages are alike, and with the cost of each."""
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
    """The part of the makespan in which a rank does nothing, the mean of all."""
    ranks = range(len(run.schedule.rows))
    return sum(map(run.idle, ranks)) / len(ranks)


def rank_table(planned: PlannedStages, schedule: Schedule) -> Iterator[str]:
    """A row for each pipeline rank; other ranks of the same stages hold as much."""
    layout, own = planned.layout, timeline(schedule, Costs(stages=planned.loads))
    rows: list[Row] = [("rank", "stages", "layers", "parameters", "peak activations", "work", "waits")]
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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{each:<{width}}" for each, width in zip(row, widths, strict=True)).rstrip()
    of = "a micro-batch of one stage" + (f" (1/{layout.chunks} of a rank's layers)" if layout.chunks > 1 else "")
    again = " from its second forward (R) on; of the others inputs are kept" if layout.recomputes else ""
    yield f"Parameters: before ZeRO shards them. Peak activations: of {of}{again}. Work: of the slowest rank's."
