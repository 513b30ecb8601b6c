"""The process of one pipeline stage in ``ds_npu predict``: steps of the real engine on a simulated NPU, in a dry run.

    python -m ds_npu.cli.prediction.present_rank REQUEST.json RANK

It writes RANK.json into the request's folder, or RANK.failure with the reason, and meanwhile RANK.phase.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch._C._distributed_c10d import FileStore, HashStore, Store

from ds_npu.cli.prediction.absent_ranks import StoreOfAbsentRanks
from ds_npu.cli.prediction.dry_run import OUT_OF_MEMORY, Request, StageReport
from ds_npu.cli.prediction.model_flop import model_flop
from ds_npu.cli.prediction.training_script import (
    FLAT_BUFFERS,
    micro_batch_loss,
    ready_model,
    training_dtype,
    ulysses_groups,
    whole_model,
)
from ds_npu.config.deepspeed_keys import value_at
from ds_npu.engine.engines import NpuEngine
from ds_npu.features.measured_step import MeasuredStep

_kept: list[Store] = []


def run_present_rank() -> None:
    """Run the request of the command line. The process ends at once: threads of torch_npu may wait for other ranks."""
    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    rank = int(sys.argv[2])
    folder = Path(request.folder)

    def enter(phase: str) -> None:
        (folder / f"{rank}.phase").write_text(phase)

    failure = None
    try:
        (folder / f"{rank}.json").write_text(json.dumps(asdict(report_of(request, rank, enter))))
    except Exception as error:
        traceback.print_exc()
        reason = OUT_OF_MEMORY if is_out_of_memory(error) else type(error).__name__
        failure = {"reason": reason, "text": str(error)}
    if failure is not None:
        (folder / f"{rank}.failure").write_text(json.dumps(failure))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failure is not None)


def report_of(request: Request, rank: int, enter: Callable[[str], None]) -> StageReport:
    """Make the engine and run two steps, of which the second one is recorded. ``enter`` is told of each phase.

    With ``recompute.budget_gib`` there are two steps more: the plan is made from two steps, and the third one follows
    it for the first time. The recording begins with the optimizer's step before the recorded forwards, whose weights
    ZeRO gathers behind the first of them, and ends before the next.
    """
    record: Any = ctypes.CDLL("libascendcl.so").ds_npu_sim_record
    record(0)
    begun = time.perf_counter()
    meet_absent_ranks(request, rank)
    enter("making the engine")
    whole = whole_model(Path(request.model), training_dtype(request.ds_config))
    flop = model_flop(whole, request.model, request.sequence_length)
    model = ready_model(request)
    mpu = ulysses_groups(model, request)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=request.ds_config, mpu=mpu
    )
    engine.tput_timer.start_step = 0  # It may wait for the device, as it does from the third step on.
    engine_seconds = time.perf_counter() - begun
    size = request.micro_batches, request.samples, request.sequence_length
    vocabulary = whole.config.get_text_config().vocab_size
    words = torch.randint(0, vocabulary, size, generator=torch.Generator().manual_seed(0))
    device: Any = torch.get_device_module(get_accelerator().device_name())
    last = 2 if value_at(request.ds_config, "ds_npu.recompute.budget_gib") is None else 4
    for step in range(1, last):
        if step > 1:
            engine.step()
        enter(f"in step {step} of {last}")
        accumulate(engine, words, mpu)
    device.synchronize()
    device.reset_peak_memory_stats()
    measured = MeasuredStep(engine, rank) if isinstance(engine, NpuEngine) else None
    enter(f"in step {last} of {last}")
    record(1)
    begun = time.perf_counter()
    engine.step()
    accumulate(engine, words, mpu)
    device.synchronize()
    record(0)
    free, total = device.mem_get_info()
    weights = sum(each.numel() * each.itemsize for each in engine.module.parameters())
    return StageReport(
        rank=rank,
        process=str(os.getpid()),
        engine_seconds=engine_seconds,
        step_seconds=time.perf_counter() - begun,
        memory=measured.finish().at_peak if measured is not None else {},
        allocated=int(device.max_memory_allocated()),
        reserved=int(device.max_memory_reserved()),
        outside=int(total - free - device.memory_reserved()),
        process_bytes=most_bytes(),
        copied_to_host=weights if engine.zero_optimization_stage() in FLAT_BUFFERS else 0,
        model_flop=flop,
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether ``error``, or one that it came from, says that the device's memory ended."""
    if error is None:
        return False
    return isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error.__cause__ or error.__context__)


def meet_absent_ranks(request: Request, rank: int) -> None:
    """Open the process group of the whole world, in which only ``request.present`` ranks have a process."""
    get_accelerator().set_device(0)
    present = len(request.present)
    inner: Store = HashStore() if present == 1 else FileStore(f"{request.folder}/store", present)
    store = StoreOfAbsentRanks(inner, request.world_size, present)
    dist.init_process_group("hccl", store=store, rank=rank, world_size=request.world_size)
    # Torch holds the C++ part of a store only.
    _kept.append(store)


def accumulate(engine: Any, words: torch.Tensor, mpu: Any) -> None:
    """The gradients of ``words`` [micro-batch, sample, token], up to the step of the optimizer."""
    for index, ids in enumerate(words.to(engine.device)):
        if index:
            engine.step()
        engine.backward(micro_batch_loss(engine, ids, mpu))


def most_bytes() -> int:
    """The most memory that this process has had at a time."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    run_present_rank()
