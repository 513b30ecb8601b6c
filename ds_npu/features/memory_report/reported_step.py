"""``ds_npu.memory_report``: uses of device memory in the second optimizer step, when all state exists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import torch.distributed as dist

from ds_npu.config.sections import MemoryReport
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change
from ds_npu.features.measured_step import MeasuredStep
from ds_npu.features.memory_report.picture import use_svg
from ds_npu.log import logger
from ds_npu.memory.memory_use import MemoryUse, use_table
from ds_npu.zero_ext.method_wraps import MethodLevel
from ds_npu.zero_ext.training_engine import TrainingEngine

PEAK = "Train/Memory/peak_bytes"
"""The event of DeepSpeed's monitor: the highest peak of all ranks."""


def _parts(value: MemoryReport, build: Build) -> Iterable[Change]:
    if value:
        what = "a table of what memory is used for in the second step"
        yield build.installed("a report of memory", what, partial(_install, value if isinstance(value, str) else None))


def _install(picture: str | None, engine: TrainingEngine) -> list[str]:
    if picture is not None and dist.get_rank() == 0:
        # A folder that cannot be written is an error now rather than after two steps.
        Path(picture).parent.mkdir(parents=True, exist_ok=True)
        Path(picture).touch()
    steps = count(1)
    measured: list[MeasuredStep] = []

    def after_step() -> None:
        step = next(steps)
        if step == 1:
            measured.append(MeasuredStep(engine, dist.get_rank()))
        elif step == 2:
            _report(engine, measured.pop().finish(), picture)

    engine.events.after_step(MethodLevel.MEMORY_REPORT, after_step)
    return []


def _report(engine: TrainingEngine, use: MemoryUse, picture: str | None) -> None:
    """Print the uses of all ranks on rank 0, and draw the rank with the highest peak."""
    found: list[MemoryUse] = [use] * dist.get_world_size()
    dist.all_gather_object(found, replace(use, curve=[]))
    highest = max(found, key=lambda each: each.peak).rank
    drawn = [use]
    if picture is not None:
        dist.broadcast_object_list(drawn, src=highest)
    if dist.get_rank() != 0:
        return
    logger().info("%s", use_table(engine.global_steps, found))
    if engine.monitor.enabled:
        engine.monitor.write_events([(PEAK, float(found[highest].peak), engine.global_samples)])
    if picture is not None:
        Path(picture).write_text(use_svg(engine.global_steps, drawn[0]), encoding="utf-8")


MEMORY_REPORT: Feature[MemoryReport] = Feature("memory_report", parts=_parts)
