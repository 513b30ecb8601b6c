"""A predicted step as an SVG picture and as a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

from ds_npu.cli.prediction.figures import MESSAGES, PredictedStage, Prediction, axes_of
from ds_npu.step_time.intervals import EXPOSED, Interval
from ds_npu.step_time.lanes import RankLanes, lanes_svg


def step_svg(prediction: Prediction) -> str:
    """An SVG file: of each present rank a lane of what its NPU does, and one of its communication, hidden or not."""
    heading = (
        f"One step of {prediction.step_seconds:.3f} s: {prediction.degrees.world_size:,} NPUs of "
        f"{prediction.machine.name}, predicted"
    )
    lanes = [_lanes_of(stage, prediction) for stage in prediction.stages]
    return lanes_svg(heading, lanes, max(1, round(prediction.step_seconds * 1e9)), prediction.shares())


def _lanes_of(stage: PredictedStage, prediction: Prediction) -> RankLanes:
    messages = [
        Interval(EXPOSED + axes_of(span.action, prediction.degrees), span.begun, span.ended)
        for span in prediction.spans
        if span.action.process == stage.report.process and span.action.kind in MESSAGES
    ]
    return RankLanes(stage.report.rank, stage.intervals, messages)


def write_trace(prediction: Prediction, file: Path) -> None:
    """Write the replayed step in Chrome's trace format, which ui.perfetto.dev shows: a process for each rank."""
    ranks = {stage.report.process: stage.report.rank for stage in prediction.stages}
    events = [
        {
            "ph": "X",
            "pid": ranks[span.action.process],
            "tid": span.action.stream,
            "ts": span.begun / 1e3,
            "dur": (span.ended - span.begun) / 1e3,
            "name": span.action.name,
            "args": dict(span.action.told),
        }
        for span in prediction.spans
    ]
    file.write_text(json.dumps({"traceEvents": events}))
