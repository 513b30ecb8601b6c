"""A prediction in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_npu.cli.prediction.dry_run import StageReport
from ds_npu.cli.prediction.figures import Prediction, busiest
from ds_npu.cli.prediction.sensitivity import WORSE, Sensitivity
from ds_npu.config.problems import printable
from ds_npu.log import aligned
from ds_npu.memory.memory_use import MemoryUse, use_table
from ds_npu.step_time.intervals import BUBBLE, HOST
from ds_npu.step_time.tables import SHOWN, activity_rows, communication_answers, flush_right
from ds_npu.topology.degrees import DENSE, NAMES

OPERATORS = 12
"""Rows of the table of operators."""
GIB = 2**30


def prediction_text(prediction: Prediction) -> Iterator[str]:
    """The answer in a few lines, then tables: activities of each stage, memory, operators."""
    yield from _headline(prediction)
    yield ""
    yield from aligned([("  " + name, value) for name, value in _answers(prediction)])
    yield ""
    yield from _activities(prediction)
    yield ""
    yield from _memory([stage.report for stage in prediction.stages])
    yield ""
    yield from _operators(prediction)
    if prediction.sensitivity:
        yield ""
        yield from _sensitivity(prediction.sensitivity)


def _headline(prediction: Prediction) -> Iterator[str]:
    request = prediction.request
    degrees = prediction.degrees
    axes = " x ".join(f"{NAMES[axis]} {degrees.size(axis)}" for axis in DENSE if degrees.size(axis) > 1) or "one rank"
    experts = f", experts over {degrees.ep}" if degrees.ep > 1 else ""
    count = f"{degrees.world_size:,} NPU{'s' if degrees.world_size > 1 else ''}"
    yield (
        f"{printable(request.model)} on {count} of {prediction.machine.name}: {axes}{experts}; "
        f"{prediction.tokens:,} tokens a step, {request.sequence_length:,} a sample"
    )
    yield "Predicted by a simulation; no NPU has run it. docs/twin.md says how far it can be trusted."


def _answers(prediction: Prediction) -> Iterator[tuple[str, str]]:
    reports = [stage.report for stage in prediction.stages]
    fullest = max(reports, key=lambda each: each.reserved + each.outside)
    needed = fullest.reserved + fullest.outside
    has = prediction.machine.hbm
    word = "yes" if prediction.fits else "NO; what follows is as if the memory were larger"
    yield "fits", f"{word}: rank {fullest.rank} needs {needed / GIB:.1f} of {has / GIB:.0f} GiB"
    yield "step", f"{prediction.step_seconds:,.3f} s"
    yield "tokens/s a NPU", f"{prediction.tokens_per_second:,.0f}"
    peak = f"of {prediction.machine.peak / 1e12:.1f} TFLOP/s"
    yield "MFU", f"{prediction.mfu:.1%} {peak} (attention over all keys counts, recomputation does not)"
    yield "HFU", f"{prediction.hfu:.1%} (what kernels compute: masked blocks of attention do not count)"
    shares = prediction.shares()
    yield from communication_answers(shares)
    yield "bubble", f"{shares.get(BUBBLE, 0.0):.1%}"
    yield "waits for the host", f"{shares.get(HOST, 0.0):.1%}"
    copied = max(each.copied_to_host for each in reports)
    yield (
        "host memory",
        f"{copied / GIB:.1f} GiB a rank, for weights that DeepSpeed copies there while it makes flat buffers"
        if copied
        else "nothing that grows with the model",
    )
    yield (
        "simulated in",
        f"{max(each.engine_seconds for each in reports):.0f} s for the engine, "
        f"{max(each.step_seconds for each in reports):.0f} s a step, "
        f"{max(each.process_bytes for each in reports) / GIB:.1f} GiB a process",
    )


def _activities(prediction: Prediction) -> Iterator[str]:
    yield "What NPUs do in a step, ms"
    ranks = [(f"rank {stage.report.rank}", stage.seconds()) for stage in prediction.stages]
    yield from flush_right(list(activity_rows(ranks, prediction.shares())))


def _memory(reports: Sequence[StageReport]) -> Iterator[str]:
    if all(each.memory for each in reports):
        uses = [MemoryUse(each.rank, each.memory, each.reserved, each.outside, []) for each in reports]
        yield use_table(2, uses)
        return
    yield "Memory at the peak, GiB (by use where the config has a ds_npu section)"
    rows: list[tuple[str, ...]] = [("", *(f"rank {each.rank}" for each in reports))]
    for name, sizes in (
        ("tensors", [each.allocated for each in reports]),
        ("fragments and spare memory of the allocator", [each.reserved - each.allocated for each in reports]),
        ("outside of the allocator: HCCL's buffers, the runtime", [each.outside for each in reports]),
    ):
        rows.append((name, *(f"{size / GIB:,.1f}" for size in sizes)))
    yield from flush_right(rows)


def _operators(prediction: Prediction) -> Iterator[str]:
    yield "Operators of all these ranks, ms"
    rows = [("", "calls", "ms")]
    longest = busiest(prediction.spans, OPERATORS)
    rows += [(name, f"{calls:,}", f"{1e3 * seconds:,.1f}") for name, calls, seconds in longest]
    yield from flush_right(rows)


def _sensitivity(found: Sequence[Sensitivity]) -> Iterator[str]:
    yield f"How much longer the step is with a number of the machine {WORSE:.0%} worse, and where the number comes from"
    shown = [each for each in found if abs(each.growth) >= SHOWN]
    yield from aligned([("  " + each.name, f"{each.growth:+6.1%}", each.evidence) for each in shown])
    if len(shown) < len(found):
        yield f"  below {SHOWN:.2%}: {', '.join(each.name for each in found if each not in shown)}"


def comparison(names: tuple[str, str], both: tuple[Mapping[str, Any], Mapping[str, Any]]) -> Iterator[str]:
    """A table of the figures of two predictions; ``both`` are contents of files of ``--json``."""
    rows = [("", *names, "second / first")]
    first, second = (each["figures"] for each in both)
    for name in first:
        one, other = first[name], second[name]
        ratio = f"{other / one:.3f}" if one else "-"
        rows.append((name.replace("_", " "), f"{one:,.4g}", f"{other:,.4g}", ratio))
    yield from flush_right(rows)
    keys = ("model", "world_size", "sequence_length", "machine")
    for key in keys:
        if both[0][key] != both[1][key]:
            yield f"  {key.replace('_', ' ')}: {printable(str(both[0][key]))} and {printable(str(both[1][key]))}"
