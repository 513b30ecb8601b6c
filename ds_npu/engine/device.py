"""The device of this process, made current before ds_npu works on it or opens a communicator from it.

DeepSpeed does so in the engine's constructor, after features have been applied. Until then torch_npu takes NPU 0 for
every process: random states are read from it, and communicators are opened from it, on every rank of the machine.
"""

from __future__ import annotations

import os
from typing import Any

from deepspeed.accelerator import get_accelerator


def use_own_device(arguments: Any = None) -> None:
    """Make the device current that DeepSpeed's engine will use, with ``arguments`` as its ``args``.

    Called where the process group exists: DeepSpeed has then set LOCAL_RANK under MPI too. Raises RuntimeError where
    LOCAL_RANK is not set, or numbers an NPU that this process does not see.
    """
    index, source = _own_index(arguments)
    accelerator = get_accelerator()
    if accelerator.device_name() == "npu":
        # It imports torch_npu.
        from ds_npu.accelerator.npu_accelerator import check_own_device

        check_own_device(index, source)
    if index >= 0:
        accelerator.set_device(index)


def _own_index(arguments: Any) -> tuple[int, str]:
    """The number of the device, and what says so (deepspeed/runtime/engine.py, _set_distributed_vars)."""
    device_rank = getattr(arguments, "device_rank", None)
    if device_rank is not None:
        return int(device_rank), f"args.device_rank={device_rank}"
    for variable in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if variable in os.environ:
            return int(os.environ[variable]), f"{variable}={os.environ[variable]}"
    raise RuntimeError(
        "LOCAL_RANK is not set, so this process does not know which device of its machine is its own. Start it with "
        "deepspeed, torchrun or accelerate launch, or set LOCAL_RANK (0 in a single process) before DeepSpeed is used."
    )
