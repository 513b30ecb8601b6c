"""The figures of a predicted step, from its replay: what each stage does when, and what that means for a user."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ds_npu.cli.prediction.dry_run import DryRun, Request, StageReport
from ds_npu.cli.prediction.sensitivity import Sensitivity
from ds_npu.simulator.replay.recording import RecordedAction
from ds_npu.simulator.replay.replay import Replay, Span
from ds_npu.step_time.intervals import (
    BUBBLE,
    COPIES,
    EXPOSED,
    HOST,
    NANO,
    WAITS,
    Interval,
    TimedPart,
    axes_between,
    mean_shares,
    one_after_another,
    seconds_of,
)
from ds_npu.step_time.lanes import COMPUTES
from ds_npu.topology.degrees import NAMES, Degrees
from ds_npu.topology.machine import Machine

MESSAGES = ("message", "collective")


@dataclass(frozen=True)
class PredictedStage:
    """A present rank's step."""

    report: StageReport
    intervals: tuple[Interval, ...]
    """One after the other, from 0 to the end of the step."""

    def seconds(self) -> dict[str, float]:
        """Seconds of each activity."""
        return seconds_of(self.intervals)


@dataclass(frozen=True)
class Prediction:
    """A step of ``step_seconds`` on ``machine``."""

    request: Request
    degrees: Degrees
    machine: Machine
    fits: bool
    step_seconds: float
    stages: tuple[PredictedStage, ...]
    spans: tuple[Span, ...]
    executed_flop: float
    """FLOP of all kernels of all ranks."""
    sensitivity: tuple[Sensitivity, ...] = ()
    """Empty where it was not asked for."""

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all data ranks."""
        request = self.request
        return request.micro_batches * request.samples * request.sequence_length * self.degrees.dp

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second and NPU."""
        return self.tokens / self.step_seconds / self.degrees.world_size

    @property
    def mfu(self) -> float:
        """The model's FLOP (``model_flop``) as a share of what the cube cores could do in bf16."""
        samples = self.tokens / self.request.sequence_length
        return self.stages[0].report.model_flop * samples / self._most_flop()

    @property
    def hfu(self) -> float:
        """The FLOP that kernels execute, as a share like ``mfu``: with recomputation, without masked blocks."""
        return self.executed_flop / self._most_flop()

    def _most_flop(self) -> float:
        return self.step_seconds * self.machine.peak * self.degrees.world_size

    def shares(self) -> dict[str, float]:
        """Parts of the step by activity, the mean of all stages, the largest first."""
        return mean_shares([stage.seconds() for stage in self.stages], self.step_seconds)


def predicted(run: DryRun, request: Request, degrees: Degrees, machine: Machine) -> Prediction:
    """Replay ``run`` on ``machine`` with contention."""
    spans = tuple(Replay(run.recording, machine).run())
    end = max((span.ended for span in spans), default=0)
    by_process: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_process[span.action.process].append(span)
    stages = tuple(
        PredictedStage(report, activities(by_process[report.process], degrees, end)) for report in run.reports
    )
    flop = sum(float(action.told.get("flop", 0)) for action in run.recording.actions)
    executed = flop * degrees.world_size / degrees.pp
    return Prediction(request, degrees, machine, run.fits, end * NANO, stages, spans, executed)


def activities(spans: Iterable[Span], degrees: Degrees, end: int) -> tuple[Interval, ...]:
    """The activity of an NPU at each time from 0 to ``end``.

    Computing hides communication, which hides copies, which hide waiting for other ranks. Communication along several
    axes at one time is an activity of its own. A wait for a message of another stage, and for the end of the step, is
    the bubble. Where nothing is on the NPU, it waits for its host.
    """
    parts = (part for span in spans for part in _parts(span, degrees))
    return one_after_another(parts, end, BUBBLE if degrees.pp > 1 else HOST)


def _parts(span: Span, degrees: Degrees) -> Iterable[TimedPart]:
    action = span.action
    if action.kind is None:
        return
    if action.kind in MESSAGES:
        axes = axes_of(action, degrees)
        yield TimedPart(1, EXPOSED + axes, span.begun, span.ended)
        yield TimedPart(3, BUBBLE if axes == NAMES["pp"] else WAITS + axes, span.ready, span.begun)
    elif action.told.get("host"):
        yield TimedPart(2, COPIES, span.begun, span.ended)
    else:
        yield TimedPart(0, COMPUTES, span.begun, span.ended)


def axes_of(action: RecordedAction, degrees: Degrees) -> str:
    """The names of the axes along which the ranks of a communicator differ."""
    return axes_between(tuple(action.told["npus"]), action.told.get("collective") == "all_to_all", degrees)


def busiest(spans: Iterable[Span], most: int) -> list[tuple[str, int, float]]:
    """Names of operators with the number of their calls and their seconds, of all stages, the longest first."""
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for span in spans:
        if span.action.kind is not None:
            seconds[span.action.name] += span.ended - span.begun
            calls[span.action.name] += 1
    return [(name, calls[name], time * NANO) for name, time in seconds.most_common(most)]


def as_json(prediction: Prediction) -> dict[str, Any]:
    """All figures, as ``--json`` writes them and ``--compare`` reads them."""
    return {
        "ds_npu predict": 1,
        "model": prediction.request.model,
        "config": prediction.request.ds_config,
        "world_size": prediction.degrees.world_size,
        "sequence_length": prediction.request.sequence_length,
        "machine": prediction.machine.name,
        "figures": dict(figures(prediction)),
        "stages": [_stage(stage) for stage in prediction.stages],
        "operators": [
            {"name": name, "calls": calls, "seconds": seconds}
            for name, calls, seconds in busiest(prediction.spans, len(prediction.spans))
        ],
        "sensitivity": [asdict(each) for each in prediction.sensitivity],
    }


def _stage(stage: PredictedStage) -> Mapping[str, Any]:
    return vars(stage.report) | {"activities": stage.seconds()}


def figures(prediction: Prediction) -> Mapping[str, float]:
    """The figures that two predictions are compared by; times in seconds, memory in GiB, shares of the step."""
    reports = [stage.report for stage in prediction.stages]
    shares = prediction.shares()
    return {
        "fits": float(prediction.fits),
        "step_seconds": prediction.step_seconds,
        "tokens_per_second_and_npu": prediction.tokens_per_second,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "peak_gib": max(report.reserved + report.outside for report in reports) / 2**30,
        "exposed_communication": sum(part for name, part in shares.items() if name.startswith(EXPOSED)),
        "waits_for_ranks": sum(part for name, part in shares.items() if name.startswith(WAITS)),
        "bubble": shares.get(BUBBLE, 0.0),
        "waits_for_host": shares.get(HOST, 0.0),
    }
