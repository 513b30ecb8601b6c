"""A store that opens communicators in which most ranks have no process.

In ``ds_npu predict`` one process runs for each pipeline stage. Ranks hand HCCL's root info to each other through the
store; when the store sees one, it tells the simulator the NPUs of all ranks of that communicator. The present rank of a
stage then acts for its absent ranks (``csrc/hccl/absence.h``).
"""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

ROOT_INFO_BYTES = 4108
"""The size of HcclRootInfo. Source: hccl_types.h of CANN."""
BATCH_COUNT = "batches of pipeline"
"""Part of the key under which all ranks count themselves at the end of a batch in stages (batch_failures.py)."""


class StoreOfAbsentRanks(Store):
    """The store ``inner`` of ``present`` processes.

    Each process stands for as many of the ``ranks`` ranks. Global ranks are numbers of NPUs.
    """

    def __init__(self, inner: Store, ranks: int, present: int) -> None:
        super().__init__()
        self._ranks, self._each = ranks, ranks // present
        self._inner = inner
        self._simulator: Any = ctypes.CDLL("libhccl.so")

    def set(self, key: str, value: Any) -> None:
        self._tell(key, value)
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._inner.get(key)
        self._tell(key, value)
        return value

    def _tell(self, key: str, value: bytes) -> None:
        if len(value) == ROOT_INFO_BYTES:
            npus = ranks_of(key)
            self._simulator.ds_npu_sim_communicator(value, len(npus), (ctypes.c_int * len(npus))(*npus))

    def add(self, key: str, value: int) -> int:
        if BATCH_COUNT in key:
            # Counts of ranks, in their lowest bits; above them stand checksums, of which absent ranks have none.
            value = self._each * (value % (1 << 2 * self._ranks.bit_length()))
        return self._inner.add(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._inner.compare_set(key, expected, desired)

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - torch's C++ calls it by this name
        return self._inner.delete_key(key)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._inner.wait(keys, *([] if timeout is None else [timeout]))


def ranks_of(key: str) -> list[int]:
    """The global ranks of the communicator with this key, ``...//GROUP//npu//NUMBER``, or ``FIRST:SECOND`` of a pair.

    Source: torch_npu 2.13, ProcessGroupHCCL::broadcastMasterID, and torch's names of groups.
    """
    group_name, _, last = key.split("//")[-3:]
    (group,) = (group for group, name in c10d._world.pg_names.items() if name == group_name)
    ranks = dist.get_process_group_ranks(group)
    return [ranks[int(rank)] for rank in last.split(":")] if ":" in last else ranks
