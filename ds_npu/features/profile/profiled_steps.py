"""``ds_npu.profile``: a window of optimizer steps, recorded on some ranks, and the report behind it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ds_npu.capability import npu_profiler
from ds_npu.config.profile import ProfileSection
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change
from ds_npu.features.profile.marked_calls import process_groups
from ds_npu.features.profile.recorders import NpuRecorder, ProfileError, Recorder, TorchRecorder
from ds_npu.log import logger
from ds_npu.models.guards import is_compiled
from ds_npu.parallel.pipeline.timeline import Costs, timeline
from ds_npu.step_time.profile_folder import write_header
from ds_npu.step_time.rank_times import Durations, RankTimes, durations_of, rank_times, shortest
from ds_npu.step_time.step_report import StepReport, report_text, write_report
from ds_npu.step_time.trace import Header, RankTrace, Scheduled, TraceError
from ds_npu.zero_ext.method_wraps import MethodLevel
from ds_npu.zero_ext.training_engine import TrainingEngine, Undo

KEY = "ds_npu.profile"


def _parts(section: ProfileSection, build: Build) -> Iterable[Change]:
    if section.steps:
        first, last = section.steps
        ranks = "all ranks" if section.ranks == "all" else f"ranks {', '.join(map(str, section.ranks))}"
        what = f"a trace and a report of steps {first} to {last} on {ranks}"
        yield build.installed("a profile", what, partial(_install, section, build))


@dataclass
class Window:
    """The window of one engine: its recorder on ranks that are recorded, and when it begins and ends."""

    engine: TrainingEngine
    section: ProfileSection
    header: Header
    recorder: Recorder | None
    """None on ranks that are not recorded."""
    undo: list[Undo] = field(default_factory=list)
    begun: int | None = None
    """The first step that is recorded; None before."""
    is_over: bool = False

    @contextmanager
    def around_call(self) -> Iterator[None]:
        """Begin the window at its first call, and mark the calls in it.

        Where there is a step before the window, it begins there, to warm the profiler up.
        """
        step = self.engine.global_steps
        first, last = self.section.steps
        trains = self.engine.module.training and torch.is_grad_enabled()
        if self.begun is None and trains and first - 1 <= step <= last:
            self._begin(step)
        if self.recorder is None or self.begun is None:
            yield
            return
        with self.recorder.marks():
            yield

    def _begin(self, step: int) -> None:
        first, last = self.section.steps
        self.begun = max(step, first)
        if step > first:
            logger().warning(
                "%s.steps: found %d to %d, and this run goes on at step %d: only steps %d to %d are recorded",
                *(KEY, first, last, step, step, last),
            )
        if self.recorder is not None:
            try:
                self.recorder.begin(warm_up=step < first, steps=last - self.begun + 1)
            except ProfileError as error:
                raise RuntimeError(f"{KEY}: step {step}: {error}") from error

    def after_step(self) -> None:
        """Pass to the next step; behind the last one of the window, all ranks make the report."""
        step = self.engine.global_steps - 1
        last = self.section.steps[1]
        if self.begun is None:
            if step >= last:
                self._end()
                self._say(f"the run went on behind step {last}: no step of the window came")
            return
        if self.recorder is not None:
            self.recorder.step()
        if step >= last:
            self._end()
            self._report(replace(self.header, steps=(self.begun, step)))

    def _end(self) -> None:
        self.is_over = True
        for undo in self.undo:
            undo()
        self.undo.clear()

    def _report(self, header: Header) -> None:
        """Write this rank's trace; all ranks tell each other of theirs, and rank 0 reports."""
        trace, problem = self._trace(header)
        durations = durations_of(trace) if trace is not None else {}
        told: list[tuple[Durations, str]] = [(durations, problem)] * dist.get_world_size()
        dist.all_gather_object(told, (durations, problem))
        least = shortest(each for each, _ in told)
        own = rank_times(trace, least) if trace is not None else None
        times: list[RankTimes | None] = [own] * dist.get_world_size()
        dist.all_gather_object(times, own)
        problems = {rank: why for rank, (_, why) in enumerate(told) if why}
        if dist.get_rank() == 0:
            self._print([each for each in times if each is not None], problems)

    def _trace(self, header: Header) -> tuple[RankTrace | None, str]:
        """The trace of this rank, None where it was not recorded; or why there is none."""
        if self.recorder is None:
            return None, ""
        try:
            trace = self.recorder.end(replace(header, communicators=process_groups()))
            write_header(Path(self.section.folder), trace.header)
        except (ProfileError, TraceError, OSError) as error:
            return None, str(error)
        return trace, ""

    def _print(self, times: list[RankTimes], problems: Mapping[int, str]) -> None:
        told: dict[str, list[int]] = {}
        for rank, why in problems.items():
            told.setdefault(why, []).append(rank)
        for why, ranks in told.items():
            logger().error("%s: no profile of rank %s: %s. The run goes on", KEY, ", ".join(map(str, ranks)), why)
        if not times:
            return
        report = StepReport(tuple(times))
        logger().info("%s", "\n".join(report_text(report)))
        folder = Path(self.section.folder)
        try:
            write_report(report, folder)
        except OSError as error:
            logger().error("%s.folder: the report is not written: %s. The run goes on", KEY, error)
            return
        logger().info("profile: traces, report.txt, report.json and report.svg are in %s", folder)

    def _say(self, text: str) -> None:
        if dist.is_initialized() and dist.get_rank() == 0:
            logger().warning("%s.steps: %s", KEY, text)

    def say_missing(self) -> None:
        """Say at the end of the run that the window never came, or never ended; keep what was recorded of it."""
        ended = self.engine.global_steps
        first, last = self.section.steps
        # A reference model's engine has the same config, and never trains.
        if self.is_over or ended == 0:
            return
        if self.begun is None or ended <= self.begun:
            if self.header.rank == 0:
                text = "%s.steps: steps %d to %d never came: the run ended behind step %d"
                logger().warning(text, KEY, first, last, ended - 1)
            return
        kept = ""
        if self.recorder is not None:
            _, problem = self._trace(replace(self.header, steps=(self.begun, ended - 1)))
            kept = problem or f"ds_npu profile {self.section.folder} reads what was recorded before"
        if self.header.rank == 0:
            text = "%s.steps: steps %d to %d never came: the run ended behind step %d. %s"
            logger().warning(text, KEY, ended, last, ended - 1, kept)


def _install(section: ProfileSection, build: Build, engine: TrainingEngine) -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    if section.ranks != "all" and (absent := [each for each in section.ranks if each >= world]):
        raise ValueError(f"{KEY}.ranks: found {absent}; the ranks of this world are 0 to {world - 1}")
    is_recorded = section.ranks == "all" or rank in section.ranks
    folder = Path(section.folder)
    if is_recorded or rank == 0:
        _check_folder(folder, rank)
    run = [secrets.token_hex(8)]
    dist.broadcast_object_list(run, src=0)
    header = Header(
        rank=rank,
        degrees=build.topology.degrees,
        steps=(section.steps[0], section.steps[1]),
        machine=build.machine.name,
        device=_device(build),
        schedule=_scheduled(build, engine),
        trace=f"rank{rank}.trace.json",
        run=run[0],
    )
    recorder = _recorder(section, build, engine) if is_recorded else None
    window = Window(engine, section, header, recorder)
    window.undo += engine.events.around_calls(MethodLevel.PROFILE, window.around_call)
    window.undo.append(engine.events.after_step(MethodLevel.PROFILE, window.after_step))
    engine.events.at_end(MethodLevel.PROFILE, window.say_missing)
    first, last = section.steps
    return [f"profile: steps {first} to {last} are recorded, and go to {section.folder}"]


def _recorder(section: ProfileSection, build: Build, engine: TrainingEngine) -> Recorder:
    folder, rank = Path(section.folder), dist.get_rank()
    if build.device_type != "cpu":
        return NpuRecorder(folder, rank, section.recorded, npu_profiler())
    # Compiled code would be traced again in a mode of torch functions.
    marked = not engine.is_deepcompile_enabled() and not any(map(is_compiled, engine.module.modules()))
    return TorchRecorder(folder, rank, section.recorded, marked=marked)


def _check_folder(folder: Path, rank: int) -> None:
    """Raise ValueError where ``folder`` cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".rank{rank}.incomplete"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"{KEY}.folder: {folder}: no profile can be written there ({error}). What to do: name another folder"
        ) from error


def _device(build: Build) -> str:
    if build.device_type == "cpu":
        return "cpu"
    return str(torch.get_device_module(build.device_type).get_device_name())


def _scheduled(build: Build, engine: TrainingEngine) -> Scheduled | None:
    """The pipeline's schedule, and its idle part if forward, backward by inputs and by weights take equal times."""
    if build.schedule is None:
        return None
    count = engine.gradient_accumulation_steps() if build.is_pipeline else engine.train_micro_batch_size_per_gpu()
    name, schedule = build.schedule(count)
    ranks = build.topology.size("pp")
    share = ranks / schedule.stages
    run = timeline(schedule, Costs(share, share, share))
    return Scheduled(name, schedule.micro_batches, sum(map(run.idle, range(ranks))) / ranks)


PROFILE: Feature[ProfileSection] = Feature("profile", parts=_parts)
