"""Trains a small model without one of the waits that order its streams, which ``ds_npu sim --races`` has to find.

    torchrun --nproc-per-node N tests/npu/planted_races.py PLANT CASES.json

A plant is named FILE:FUNCTION: what this function of a file of that name asks to be waited for is not waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import training_steps

import ds_npu.comm.pending
from ds_npu.zero_ext import gather_plan

assert deepspeed.__version__


def without_wait(plant: str, wait: Callable[..., Any]) -> Callable[..., Any]:
    """``wait``, but for calls from the plant's function."""
    file, function = plant.split(":")

    def waited(*args: Any) -> Any:
        code = sys._getframe(1).f_code
        is_planted = code.co_name == function and code.co_filename.endswith(f"/{file}.py")
        return None if is_planted else wait(*args)

    return waited


def main() -> None:
    plant = sys.argv.pop(1)
    for name in ("wait_stream", "wait_event"):
        setattr(torch.npu.Stream, name, without_wait(plant, getattr(torch.npu.Stream, name)))
    for kind in (ds_npu.comm.pending.Works, torch.distributed.Work):
        kind.wait = without_wait(plant, kind.wait)
    gather_plan.LEAST = 2000
    # Activations of 1 MiB and more are swapped.
    training_steps.SAMPLES, training_steps.LENGTH = 512, 64
    training_steps.main()


if __name__ == "__main__":
    main()
