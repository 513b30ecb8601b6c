"""ZeRO 3 gathers parameters on a stream of its own, which has to wait for the step that has changed them.

With ``overlap_comm``, the default, DeepSpeed (0.19.8 runtime/zero/partitioned_param_coordinator.py:400) gathers on a
stream that waits for nothing: where the host runs ahead (a script that reads no loss between two steps), the first
gathers of a forward may read parameters that the optimizer is still to write, and the forward computes with old ones.
Seen on simulated NPUs, whose losses then differed from run to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.accelerator import get_accelerator

from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method

GATHERS = "_DeepSpeedZeRoOffload__allgather_stream"


def gather_after_steps(optimizer: Any) -> None:
    """Let the stream that gathers the parameters of ``optimizer``, ZeRO 3's, wait for each of its steps, on the device.

    Changes this instance only. Raises RuntimeError where the stream does not exist.
    """
    offload = optimizer.parameter_offload
    if not hasattr(offload, GATHERS):
        raise RuntimeError(
            f"{type(offload).__name__} has no {GATHERS}: this DeepSpeed gathers parameters in another way. What to do: "
            "zero_optimization.overlap_comm false, and tell the authors of ds_npu the version"
        )
    stream = getattr(offload, GATHERS)
    if stream is None:
        return

    def stepped(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        done = step(*args, **kwargs)
        stream.wait_stream(get_accelerator().current_stream())
        return done

    wrap_method(optimizer, "step", stepped, MethodLevel.CORRECTION)
