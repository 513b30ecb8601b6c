"""Defaults of HCCL and torch_npu that suit training, set only where the user has set nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

from ds_npu.capability import DEFAULTS_MARK

# torch_npu's own timeouts, in s (Ascend/pytorch, torch_npu/csrc/distributed/ProcessGroupHCCL.cpp).
DEFAULT_EXEC_TIMEOUT_S = 1836
EVENT_OVER_EXEC_S = 32
LARGEST_TIMEOUT_S = 2**31 - 1
# CANN's HCCL user guide: HCCL_CONNECT_TIMEOUT is 120 to 7200 s.
LARGEST_CONNECT_TIMEOUT_S = 7200


@dataclass(frozen=True)
class Job:
    """Facts on which a default may depend."""

    environ: Mapping[str, str]
    bound_to_cores: bool
    """Whether numactl (DeepSpeed's --bind_cores_to_rank), taskset or a cgroup already limits this process."""

    def number(self, name: str) -> int | None:
        """The value of ``name``, None where it is unset or no integer >= 0."""
        text = self.environ.get(name, "")
        return int(text) if text.isdecimal() else None


def _connect_timeout(job: Job) -> str | None:
    # A choice of this project: ranks load data and build operators before their first collective, at uneven speed.
    # Under mpirun DeepSpeed sets WORLD_SIZE only later, when it asks MPI.
    sizes = [job.number(name) or 1 for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")]
    return None if max(sizes) == 1 else str(min(LARGEST_CONNECT_TIMEOUT_S, 300 + max(sizes)))


def _exec_timeout(job: Job) -> str | None:
    # DEEPSPEED_TIMEOUT (minutes, deepspeed/constants.py) is the process group's; HCCL must not give up before it.
    group_s = 60 * (job.number("DEEPSPEED_TIMEOUT") or 0)
    if group_s <= DEFAULT_EXEC_TIMEOUT_S or job.environ.get("HCCL_OP_EXPANSION_MODE") == "AIV":
        return None
    return str(min(group_s, LARGEST_TIMEOUT_S - EVENT_OVER_EXEC_S))


def _event_timeout(job: Job) -> str | None:
    exec_s = job.number("HCCL_EXEC_TIMEOUT")
    return None if exec_s is None else str(min(exec_s + EVENT_OVER_EXEC_S, LARGEST_TIMEOUT_S) if exec_s else 0)


# Applied in this order: a later rule sees what an earlier one has set. None leaves a variable to HCCL or torch_npu.
DEFAULTS: tuple[tuple[str, Callable[[Job], str | None]], ...] = (
    ("HCCL_CONNECT_TIMEOUT", _connect_timeout),
    ("HCCL_EXEC_TIMEOUT", _exec_timeout),
    ("HCCL_EVENT_TIMEOUT", _event_timeout),
    # The range goes before HCCL_IF_BASE_PORT, so setting it would undo the user's base port.
    ("HCCL_HOST_SOCKET_PORT_RANGE", lambda job: None if "HCCL_IF_BASE_PORT" in job.environ else "auto"),
    ("TASK_QUEUE_ENABLE", lambda job: None if job.environ.get("ASCEND_LAUNCH_BLOCKING") == "1" else "1"),
    # torch_npu raises where both this and PYTORCH_ALLOC_CONF are set (NPUAllocatorConfig.cpp).
    (
        "PYTORCH_NPU_ALLOC_CONF",
        lambda job: None if "PYTORCH_ALLOC_CONF" in job.environ else "expandable_segments:True",
    ),
    # Set only in a rank: the launcher would hand it on to ranks that numactl binds.
    ("CPU_AFFINITY_CONF", lambda job: "1" if "LOCAL_RANK" in job.environ and not job.bound_to_cores else None),
)


def bound_to_cores() -> bool:
    """Whether this process may run on fewer cores than the machine has."""
    return len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)


def apply_defaults(environ: MutableMapping[str, str], bound: bool) -> dict[str, str]:
    """Set the defaults that the user has not set in ``environ``, mark them as ours, and return them.

    torch_npu reads these when the device, the allocator or the first process group is first used, so this must run
    before any of them.
    """
    applied: dict[str, str] = {}
    for name, rule in DEFAULTS:
        value = None if name in environ else rule(Job(environ, bound))
        if value is not None:
            environ[name] = applied[name] = value
    if applied:
        before = [name for name in environ.get(DEFAULTS_MARK, "").split(",") if name]
        environ[DEFAULTS_MARK] = ",".join([*before, *applied])
    return applied
