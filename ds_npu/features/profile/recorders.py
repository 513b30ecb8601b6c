"""Profilers that record a window of steps: torch.profiler on the CPU, torch_npu.profiler on NPUs."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ds_npu.features.profile.marked_calls import MarkedCalls
from ds_npu.step_time.npu_trace import read_npu_trace
from ds_npu.step_time.torch_trace import read_torch_trace
from ds_npu.step_time.trace import Header, RankTrace, TraceError

FEWER = "What to do: profile fewer steps (ds_npu.profile.steps), or less of them (ds_npu.profile.with)"
EVENT_BYTES = 700
"""Bytes of an event in a trace with shapes; one without is smaller, one of a Python function too."""
MOST_BYTES = 2 * 2**30
"""The largest trace that a rank writes."""


class ProfileError(RuntimeError):
    """A profile that cannot be recorded or written; the text says why, and what to do."""


class Recorder(Protocol):
    """Records steps of one rank, from ``begin`` to ``end``."""

    def begin(self, *, warm_up: bool, steps: int) -> None:
        """Start to record ``steps``; with ``warm_up``, behind one more that warms the profiler up."""

    def step(self) -> None:
        """Pass to the next step."""

    def end(self, header: Header) -> RankTrace:
        """Write the trace and read it; raises ProfileError or TraceError where that fails."""

    def stop(self) -> None:
        """Stop recording, and write nothing."""

    def marks(self) -> Any:
        """The context of each call of the engine."""


class TorchRecorder:
    """torch.profiler on the CPU, and its trace ``rank<N>.trace.json`` in ``folder``."""

    def __init__(self, folder: Path, rank: int, recorded: Collection[str], *, marked: bool) -> None:
        self.folder, self.rank, self.recorded, self.marked = folder, rank, recorded, marked
        self.profiler: Any = None
        self.warms_up = False

    def begin(self, *, warm_up: bool, steps: int) -> None:
        """Start the profiler; raises ProfileError where another one runs."""
        if torch._C._autograd._profiler_enabled():
            raise ProfileError(ANOTHER)
        self.profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=0, warmup=int(warm_up), active=steps + 1, repeat=1),
            record_shapes="shapes" in self.recorded,
            profile_memory="memory" in self.recorded,
            with_stack="stacks" in self.recorded,
            acc_events=True,
        )
        self.warms_up = warm_up
        self.profiler.start()

    def step(self) -> None:
        """Pass to the next step, where the profiler is still the only one."""
        if self.warms_up or torch._C._autograd._profiler_enabled():
            self.profiler.step()
        self.warms_up = False

    def end(self, header: Header) -> RankTrace:
        """Write the trace and read it; raises ProfileError where another profiler has run, or there is no room."""
        own, self.profiler = self.profiler, None
        _check_alone(own.profiler)
        own.stop()
        path = self.folder / f"rank{self.rank}.trace.json"
        events = len(own.profiler.kineto_results.events())
        _check_space(self.folder, events * EVENT_BYTES)
        own.export_chrome_trace(str(path))
        if not path.exists():
            # Kineto writes to this name first, and raises nothing.
            path.with_suffix(".json.tmp").unlink(missing_ok=True)
            raise ProfileError(f"{path}: it cannot be written, {_free(self.folder)}. What to do: name another folder")
        return read_torch_trace(path, header)

    def stop(self) -> None:
        """Stop recording, and write nothing."""
        own, self.profiler = self.profiler, None
        if torch._C._autograd._profiler_enabled():
            own.stop()

    @contextmanager
    def marks(self) -> Iterator[None]:
        """Name the process groups of the collectives of a call of the engine."""
        if not self.marked or self.profiler is None:
            yield
            return
        with MarkedCalls():
            yield


class NpuRecorder:
    """torch_npu.profiler, and its folder ``rank<N>_..._ascend_pt`` in ``folder``."""

    def __init__(self, folder: Path, rank: int, recorded: Collection[str], module: Any) -> None:
        """``module``: torch_npu.profiler."""
        self.folder, self.rank, self.recorded, self.module = folder, rank, recorded, module
        self.profiler: Any = None
        self.too_large = 0
        """Bytes of a trace that was given up."""

    def begin(self, *, warm_up: bool, steps: int) -> None:
        """Start the profiler; raises ProfileError where another one runs."""
        module = self.module
        if module.profiler.ProfPathCreator().is_prof_inited or torch._C._autograd._profiler_enabled():
            raise ProfileError(ANOTHER)
        settings = module._ExperimentalConfig(
            export_type=[module.ExportType.Db], profiler_level=module.ProfilerLevel.Level1
        )
        self.profiler = module.profile(
            activities=[module.ProfilerActivity.CPU, module.ProfilerActivity.NPU],
            schedule=module.schedule(wait=0, warmup=int(warm_up), active=steps + 1, repeat=1),
            on_trace_ready=module.tensorboard_trace_handler(str(self.folder), f"rank{self.rank}"),
            record_shapes="shapes" in self.recorded,
            profile_memory="memory" in self.recorded,
            with_stack="stacks" in self.recorded,
            experimental_config=settings,
        )
        self.profiler.start()

    def step(self) -> None:
        """Pass to the next step; give up where the raw data, which are written meanwhile, are too large."""
        if self.profiler is None:
            return
        torch.get_device_module("npu").synchronize()
        self.profiler.step()
        self.too_large = sum(each.stat().st_size for each in self._made().rglob("*") if each.is_file())
        if self.too_large > MOST_BYTES:
            self.stop()

    def end(self, header: Header) -> RankTrace:
        """Have torch_npu write its database, and read it; raises ProfileError where the raw data were too large."""
        if self.profiler is None:
            raise ProfileError(_too_large(self.too_large))
        own, self.profiler = self.profiler, None
        made = self._made(own)
        own.stop()
        try:
            return read_npu_trace(made, replace(header, trace=made.name))
        except TraceError as error:
            raise ProfileError(
                f"{error}; {_free(self.folder)}. What to do: name another folder if that is why"
            ) from error

    def stop(self) -> None:
        """Stop recording, and remove what was written."""
        own, self.profiler = self.profiler, None
        made = self._made(own)
        own.on_trace_ready = own.action_controller.on_trace_ready = None
        own.stop()
        shutil.rmtree(made, ignore_errors=True)

    def marks(self) -> Any:
        """No context: HCCL's calls have the names of their communicators."""
        return nullcontext()

    def _made(self, own: Any = None) -> Path:
        return Path((own or self.profiler).prof_if.prof_path)


def _check_alone(own: Any) -> None:
    """Raise ProfileError where another profiler was started in the window: torch then ends the first one."""
    started = torch.autograd.profiler.profile
    # The call is made once, behind the last step of the window.
    others = [each for each in gc.get_objects() if type(each) is started and each is not own and each.entered]
    if others and any(not hasattr(each, "kineto_results") or each.kineto_results is None for each in others):
        raise ProfileError(INTRUDED)
    if not torch._C._autograd._profiler_enabled():
        raise ProfileError(INTRUDED)


ANOTHER = (
    "another profiler runs already: the script's own, or one of its client. What to do: leave ds_npu.profile out, or "
    "take the script's profiler out of its steps"
)
INTRUDED = (
    "another profiler was started in the window, the script's own or one of its client, and has ended this one. "
    "What to do: choose other ds_npu.profile.steps, or take the script's profiler out"
)


def _check_space(folder: Path, needed: int) -> None:
    """Raise ProfileError where a trace of about ``needed`` bytes is too large, or the disk too full."""
    if needed > MOST_BYTES:
        raise ProfileError(_too_large(needed))
    if shutil.disk_usage(folder).free < needed:
        raise ProfileError(f"{folder}: the trace needs about {needed / 2**20:,.0f} MiB, {_free(folder)}. {FEWER}")


def _too_large(needed: int) -> str:
    found, most = needed / 2**30, MOST_BYTES / 2**30
    return f"the trace takes about {found:.1f} GiB, and a rank writes {most:.0f} GiB at most. {FEWER}"


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free there"
