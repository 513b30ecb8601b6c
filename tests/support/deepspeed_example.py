"""Runs one of DeepSpeed's example scripts, which is not changed, on the CPU, and records its losses: a rank's program.

    torchrun --nproc_per_node N tests/support/deepspeed_example.py RECORD SECTION SCRIPT ARGUMENTS ...

RECORD is a folder for the losses of each rank, SECTION the "ds_npu" section of every config as JSON, or "none".
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parent
sys.path.insert(0, str(SUPPORT / "stand_ins"))

import deepspeed  # noqa: E402
import deepspeed_section  # noqa: E402
import torch  # noqa: E402


def without_cuda(*_: object) -> None:
    """In the place of torch.cuda.set_device, which the pipeline tutorial calls on every machine."""


def recording(initialize: Any, losses: list[float]) -> Any:
    """``initialize`` whose engines append each loss, as the script sees it, to ``losses``."""

    @functools.wraps(initialize)
    def recorded_initialize(*args: Any, **kwargs: Any) -> Any:
        engine, *others = initialize(*args, **kwargs)
        backward = engine.backward

        def recorded_backward(loss: torch.Tensor, *more: Any, **named: Any) -> Any:
            losses.append(loss.item())
            return backward(loss, *more, **named)

        engine.backward = recorded_backward
        if hasattr(engine, "train_batch"):
            train = engine.train_batch

            def recorded_train_batch(*more: Any, **named: Any) -> Any:
                loss = train(*more, **named)
                losses.append(loss.item())
                return loss

            engine.train_batch, engine.backward = recorded_train_batch, backward
        return engine, *others

    return recorded_initialize


def main() -> None:
    record, section, script, *arguments = sys.argv[1:]
    # DeepSpeed's shared-memory collectives take a minute to compile.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    losses: list[float] = []
    torch.cuda.set_device = without_cuda
    deepspeed.initialize = recording(deepspeed.initialize, losses)
    if section != "none":
        deepspeed_section.install(json.loads(section))
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    # cifar10_deepspeed.py begins at other weights in every run.
    torch.manual_seed(0)
    runpy.run_path(script, run_name="__main__")
    Path(record, f"rank{os.environ['RANK']}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
