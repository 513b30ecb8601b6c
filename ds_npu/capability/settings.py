"""The environment variables HCCL and torch_npu read, their defaults, and which of them are set here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULTS_MARK = "DS_NPU_DEFAULTS_SET"
"""Variable that lists, comma separated, those ds_npu has set, so that children do not take them for the user's."""


@dataclass(frozen=True)
class Setting:
    """One variable: its value here (None: unset), its default, a note, and who set it."""

    name: str
    value: str | None
    default: str
    note: str
    origin: str
    """``user``, ``ds_npu`` or ``default``."""


# (name, default, note). Sources: Ascend/pytorch docs/zh/api/environment_variable/ and
# torch_npu/csrc/core/npu/register/OptionsManager.cpp of commit 9e73e708; CANN's HCCL user guide for HCCL_*.
SETTINGS: tuple[tuple[str, str, str], ...] = (
    ("ASCEND_RT_VISIBLE_DEVICES", "all", "the only variable that hides devices; numbers, ascending"),
    ("HCCL_CONNECT_TIMEOUT", "120", "s a rank waits for the others to connect, 120 to 7200"),
    ("HCCL_EXEC_TIMEOUT", "1836", "s a collective may wait for another rank, 0: for ever"),
    ("HCCL_EVENT_TIMEOUT", "HCCL_EXEC_TIMEOUT + 32", "s a stream may wait for an event; above HCCL_EXEC_TIMEOUT"),
    ("HCCL_BUFFSIZE", "200", "MiB; every communicator takes twice this from device memory"),
    ("P2P_HCCL_BUFFSIZE", "20", "MiB for send and recv, twice per communicator, 0: no communicator of their own"),
    ("HCCL_IF_BASE_PORT", "60000", "first port of the host; jobs that share a host need different ones"),
    ("HCCL_HOST_SOCKET_PORT_RANGE", "unset", "ports of the host, or auto; goes before HCCL_IF_BASE_PORT"),
    ("HCCL_NPU_SOCKET_PORT_RANGE", "unset", "the same for the device's network card"),
    ("HCCL_SOCKET_IFNAME", "first found", "network card of the host; set GLOO_ and TP_SOCKET_IFNAME with it"),
    ("GLOO_SOCKET_IFNAME", "by host name", "network card of gloo groups"),
    ("TP_SOCKET_IFNAME", "by host name", "network card of tensorpipe"),
    ("HCCL_IF_IP", "unset", "address of the host; goes before HCCL_SOCKET_IFNAME"),
    ("HCCL_WHITELIST_DISABLE", "CANN's", "1: any host may connect"),
    ("HCCL_RDMA_TIMEOUT", "CANN's", "how long the network waits before it retries"),
    ("HCCL_OP_EXPANSION_MODE", "by device", "where collectives are scheduled; AIV allows HCCL_EXEC_TIMEOUT <= 1091"),
    ("HCCL_DETERMINISTIC", "false", "true: reductions in a fixed order, slower"),
    ("RANK_TABLE_FILE", "unset", "absolute path; connecting then takes a time independent of the number of ranks"),
    ("TASK_QUEUE_ENABLE", "1", "2 for scripts bound by the host, at more memory; no effect with launch blocking"),
    ("ASCEND_LAUNCH_BLOCKING", "0", "1: every operator waits, for debugging"),
    ("CPU_AFFINITY_CONF", "0", "1: each device's process on its share of the cores; 2: its busy threads pinned too"),
    ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False", "not together with PYTORCH_ALLOC_CONF: torch_npu raises"),
    ("MULTI_STREAM_MEMORY_REUSE", "1", "0: blocks used on two streams are freed late"),
    ("INF_NAN_MODE_ENABLE", "1", "0: overflow saturates and stays unseen"),
    ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "1", "1: a network error (ERROR CQE) ends the process"),
)


def hccl_environment(environ: Mapping[str, str] | None = None) -> list[Setting]:
    """The variables in force: every row of ``SETTINGS`` with its value in ``environ`` (this process's by default)."""
    environ = os.environ if environ is None else environ
    ours = environ.get(DEFAULTS_MARK, "").split(",")
    origins = {name: "ds_npu" if name in ours else "user" for name in environ}
    return [
        Setting(name, environ.get(name), default, note, origins.get(name, "default"))
        for name, default, note in SETTINGS
    ]
