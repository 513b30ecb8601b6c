"""Dry runs of a training step: one process for each pipeline stage on simulated NPUs, and what they report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ds_npu.config.problems import Config
from ds_npu.simulator.environment import MOST_MEMORY, Simulation
from ds_npu.simulator.replay.recording import RecordedRun, read_recording

WORKER = "ds_npu.cli.prediction.present_rank"
OUT_OF_MEMORY = "no memory"
"""The reason that a run gives where the device's memory was not enough."""
TELLING, MOST_SHOWN = ("simulated NPU", "Error"), 300
"""Words in lines that say why a process ended, and the number of shown characters of such a line."""
LOOK_SECONDS, TELL_SECONDS = 0.1, 10.0
"""Seconds between two looks at the processes, and between two lines about their progress."""


@dataclass(frozen=True)
class Request:
    """The run that is predicted; ``folder`` is where its files go."""

    folder: str
    ds_config: Config
    model: str
    sequence_length: int
    samples: int
    """Samples of a micro-batch."""
    micro_batches: int
    """Micro-batches of a step (gradient_accumulation_steps)."""
    world_size: int
    present: list[int]
    """The ranks that have a process: the first one of each pipeline stage."""
    gradient_checkpointing: bool = False
    """Whether it is switched on in the model, as a client would."""


@dataclass(frozen=True)
class StageReport:
    """The facts of a stage that its present rank found."""

    rank: int
    process: str
    """The id of the process, by which the recording names its actions."""
    engine_seconds: float
    """Wall clock until the engine was made."""
    step_seconds: float
    """Wall clock of the recorded step."""
    memory: dict[str, int]
    """Bytes at the peak of the recorded step, by use; empty without a ds_npu section."""
    allocated: int
    """Bytes of tensors at the peak of the recorded step."""
    reserved: int
    """The most that the device's allocator had from the device, unused parts included."""
    outside: int
    """Device memory outside of the allocator: HCCL's buffers."""
    process_bytes: int
    """The most memory that this process took of the machine that simulates."""
    copied_to_host: int
    """Bytes of weights that DeepSpeed copies to the host while it makes its flat buffers."""
    model_flop: float
    """FLOP of the whole model for a sample, forward and backward (model_flop.py)."""


@dataclass(frozen=True)
class DryRun:
    """The record of one step, and the report of each present rank, in the order of stages."""

    recording: RecordedRun
    reports: tuple[StageReport, ...]
    fits: bool
    """Whether the memory was enough; if not, the record is that of a second run with more."""


class PredictionError(Exception):
    """Why a run cannot be predicted, in words for the user."""


class OutOfMemoryError(Exception):
    """The memory of a simulated NPU was too small."""


def dry_run(request: Request, simulation: Simulation, home: Path, tell: Callable[[str], None]) -> DryRun:
    """Run ``request`` on NPUs of ``simulation``; where their memory is too small, again with as much as there can be.

    ``home``: the folder of the simulator's libraries. ``tell``: is given lines about the progress. Raises
    PredictionError where a process ends without a report.
    """
    try:
        return DryRun(*_run(request, simulation, home, tell), fits=True)
    except OutOfMemoryError:
        tell("it does not fit; it runs again with more memory, to find how much it needs")
    again = replace(request, folder=tempfile.mkdtemp(dir=request.folder))
    return DryRun(*_run(again, replace(simulation, memory_bytes=MOST_MEMORY), home, tell), fits=False)


def _run(
    request: Request, simulation: Simulation, home: Path, tell: Callable[[str], None]
) -> tuple[RecordedRun, tuple[StageReport, ...]]:
    folder = Path(request.folder)
    trace = folder / "trace"
    trace.mkdir()
    file = folder / "request.json"
    file.write_text(json.dumps(asdict(request)))
    environment = replace(simulation, trace=str(trace)).environment(home, os.environ)
    begun = time.monotonic()
    processes = {rank: _started(request, rank, file, environment) for rank in request.present}
    codes: dict[int, int | None] = {}
    try:
        told = begun
        while any(process.poll() is None for process in processes.values()):
            if any(process.poll() for process in processes.values()):
                break
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                tell(f"{told - begun:.0f} s: {_progress(folder, request.present)}")
            time.sleep(LOOK_SECONDS)
        codes = {rank: process.poll() for rank, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    _check(folder, codes)
    reports = tuple(StageReport(**json.loads(_text(folder / f"{rank}.json"))) for rank in request.present)
    return read_recording(trace), reports


def _started(request: Request, rank: int, file: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(request.world_size),
        "LOCAL_RANK": "0",
        "ASCEND_RT_VISIBLE_DEVICES": str(rank),
        # DeepSpeed asks for both; the process group has a store already.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "npu",
        # The replay has a thread of its own that launches tasks.
        "TASK_QUEUE_ENABLE": "1",
        "ASCEND_LAUNCH_BLOCKING": "0",
    }
    with Path(request.folder, f"{rank}.log").open("wb") as log:
        command = [sys.executable, "-m", WORKER, str(file), str(rank)]
        return subprocess.Popen(command, env={**environment, **own}, stdout=log, stderr=subprocess.STDOUT)


def _progress(folder: Path, ranks: list[int]) -> str:
    phases = [_text(folder / f"{rank}.phase") or "starting" for rank in ranks]
    return ", ".join(f"{phases.count(phase)} x {phase}" for phase in dict.fromkeys(phases))


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _check(folder: Path, codes: Mapping[int, int | None]) -> None:
    """Raise PredictionError or OutOfMemoryError with the reason of a run of which a rank has no report.

    ``codes``: exit codes of the ranks' processes before the others, which waited for them, were ended.
    """
    reasons = [json.loads(text) for text in map(_text, sorted(folder.glob("*.failure"))) if text]
    if any(reason["reason"] == OUT_OF_MEMORY for reason in reasons):
        raise OutOfMemoryError
    if reasons:
        raise PredictionError(f"{reasons[0]['text']}\n({reasons[0]['reason']}; all output: {folder})")
    for rank, code in codes.items():
        if code:
            lines = _text(folder / f"{rank}.log").splitlines()
            told = [line.strip()[:MOST_SHOWN] for line in lines if any(word in line for word in TELLING)]
            last = told[-1] if told else "it did not say why"
            raise PredictionError(f"the process of rank {rank} ended with code {code}: {last} (all output: {folder})")
