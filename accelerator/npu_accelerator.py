"""DeepSpeed's accelerator for Ascend NPUs, with the gaps of its built-in one closed."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from typing import Any, cast

import torch

from ds_npu import capability
from ds_npu.accelerator.environment import apply_defaults, bound_to_cores
from ds_npu.log import warn_once

# Added to DeepSpeed's own. Its launcher sends a variable to other nodes if its name STARTS with one of these
# (deepspeed/launcher/runner.py), so each is long enough to leave unrelated variables out.
EXPORTED_PREFIXES: tuple[str, ...] = (
    "DS_ACCELERATOR",
    "DS_NPU_",
    "DEEPSPEED_TIMEOUT",
    "TORCH_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
    "P2P_HCCL_BUFFSIZE",
    "RANK_TABLE_FILE",
    "TASK_QUEUE_ENABLE",
    "PER_STREAM_QUEUE",
    "STREAMS_PER_DEVICE",
    "CPU_AFFINITY_CONF",
    "MULTI_STREAM_MEMORY_REUSE",
    "COMBINED_ENABLE",
    "INF_NAN_MODE_",
    "ACL_",
    "ATB_",
    "NPU_",
    "OOM_SNAPSHOT_",
    "GLOO_",
    "TP_SOCKET_IFNAME",
    "OMP_",
    "LD_PRELOAD",
)


def _npu() -> Any:
    return cast(Any, torch).npu


def check_own_device(index: int, source: str) -> None:
    """Check NPU ``index``, which ``source`` names, before it becomes this process's device.

    Raises RuntimeError where the process does not see it. Warns where the process has made another NPU current, by
    set_device or by using one: its tensors remain there, and a communicator that is opened there is another one.
    """
    count = _npu().device_count()
    if index >= count:
        visible = os.environ.get(capability.VISIBLE_DEVICES)
        listed = "is not set" if visible is None else f"is {visible!r}"
        raise RuntimeError(
            f"{source} makes NPU {index} this process's own, and the process sees {count} of them "
            f"({capability.VISIBLE_DEVICES} {listed}). DeepSpeed numbers the devices of a machine by LOCAL_RANK: start "
            f"as many processes as there are NPUs, and let each of them see the NPUs of all."
        )
    current = capability.current_npu()
    if current not in (None, index):
        warn_once(
            f"this process has worked on npu:{current}, and DeepSpeed trains on npu:{index} ({source}), which is "
            f"current from here on. Tensors made so far stay on npu:{current}, where they take memory from the rank "
            f"whose device that is. What to do: call torch.npu.set_device({index}) at the start of the script."
        )


class _Ranges(threading.local):
    """The profiler's ranges that are open in this thread, by domain, innermost last."""

    def __init__(self) -> None:
        self.open: dict[str, list[int]] = {}


class NpuAcceleratorMixin:
    """An Ascend NPU as DeepSpeed sees it; ``over`` puts it over DeepSpeed's NPU_Accelerator.

    Making one sets the defaults of ``ds_npu.accelerator.environment`` and never raises: without a device it warns, and
    the first call that training cannot do without raises RuntimeError.
    """

    supports_nvtx_domain = True

    def __init__(self) -> None:
        super().__init__()
        self._describing = False
        self._device_seen = False
        self._ranges = _Ranges()
        self._marker: Any = capability.range_marker()
        apply_defaults(os.environ, bound_to_cores())
        if missing := capability.missing_devices():
            warn_once(f"DeepSpeed was told to use NPUs, and training on them will stop with an error. {missing}")

    def _require_device(self, asked: str) -> None:
        if self._device_seen or self._describing:
            return
        state = capability.torch_npu_state()
        if not state.usable:
            raise RuntimeError(f"{asked} needs an NPU: {state.reason}. What to do: {state.advice}.")
        self._device_seen = True

    @contextlib.contextmanager
    def describing(self) -> Iterator[None]:
        """Allow a missing device within the context: ds_report asks for the communication backend on any machine."""
        self._describing = True
        try:
            yield
        finally:
            self._describing = False

    def communication_backend_name(self) -> str:
        """Return ``hccl``. ``deepspeed.initialize`` and ``init_distributed`` call it first, so it raises RuntimeError
        where there is no device, before HCCL ends in an error that does not say so."""
        self._require_device("deepspeed.initialize")
        return cast(str, super().communication_backend_name())  # type: ignore[misc]

    def communication_backend_version(self) -> tuple[int, ...]:
        """The leading numbers of CANN's version, which HCCL is a part of, as (8, 5, 0); () if unknown."""
        return tuple(
            int(number) for number in re.findall(r"\d+", re.split(r"[A-Za-z]", capability.cann_version() or "")[0])
        )

    def set_device(self, device_index: int) -> None:
        """Make NPU ``device_index`` current. Raises RuntimeError where there is no device."""
        self._require_device(f"set_device({device_index})")
        super().set_device(device_index)  # type: ignore[misc]

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes this process could still get: what the device has free, and what torch_npu holds without using it.

        The built-in accelerator takes total minus allocated, which counts memory of other processes as free.
        """
        npu = _npu()
        free_bytes, _ = npu.mem_get_info(device_index)
        return int(free_bytes + npu.memory_reserved(device_index) - npu.memory_allocated(device_index))

    def is_fp64_supported(self) -> bool:
        """False: torch_npu casts to float32 where float64 is asked for (Ascend/pytorch,
        torch_npu/csrc/aten/common/ToKernelNpu.cpp: "Device do not support double dtype now"). DeepSpeed then
        accumulates gradient norms in float32 (deepspeed/runtime/zero/utils.py, get_norm_dtype)."""
        return False

    def is_current_stream_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return bool(_npu().is_current_stream_capturing())

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Open a named range in the profile. mstx has no categories, so ``category`` is ignored.

        Ranges are started and ended by number: mstx's own push and pop share one stack between threads, and leave an
        entry behind when profiling stops in between (Ascend/pytorch, torch_npu/csrc/profiler/mstx_mgr.cpp).
        """
        if self._marker is None:
            return
        name = domain or "default"
        # 0 is mstx's number for "not being profiled"; it may also be None after a failure inside mstx.
        number = self._marker.range_start(msg, domain=name) if msg else 0
        self._ranges.open.setdefault(name, []).append(number or 0)

    def range_pop(self, domain: str | None = None) -> None:
        """Close the innermost open range of ``domain`` in this thread; nothing happens where none is open."""
        name = domain or "default"
        opened = self._ranges.open.get(name)
        if number := opened.pop() if opened else 0:
            self._marker.range_end(number, name)

    def export_envs(self) -> list[str]:
        """Prefixes of the variables the launcher sends to the other nodes."""
        return [*super().export_envs(), *EXPORTED_PREFIXES]  # type: ignore[misc]

    def op_builder_dir(self) -> str:
        """The package whose classes are the operator builders of this device."""
        return "ds_npu.ops.builders"


def over(built_in: type) -> type:
    """The accelerator class to use in place of DeepSpeed's ``built_in``.

    It is made when DeepSpeed imports its own, possibly while this module is being imported.
    """
    return type(
        "NpuAccelerator",
        (NpuAcceleratorMixin, built_in),
        {"__doc__": NpuAcceleratorMixin.__doc__, "__module__": __name__},
    )
