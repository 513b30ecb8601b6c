"""Agreement of all ranks on a save's outcome: by collectives on the script's thread, by the store on another one.

Another thread must not call collectives of the groups that training uses.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import Store

LONGEST_PAUSE_S = 0.5
LEAVING_S = 60.0
"""How long rank 0, whose process may hold the store, waits for the others to leave the agreement."""


class RankAgreement(Protocol):
    """Calls that all ranks make together, in the same order."""

    def gather(self, mine: Any) -> list[Any]:
        """Gather ``mine``, a value that JSON can hold, from all ranks; returns the values by rank."""

    def barrier(self) -> None:
        """Wait for all ranks."""


class CollectiveAgreement:
    """Agreement by collectives of the default group."""

    def gather(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        return found

    def barrier(self) -> None:
        dist.barrier()


class StoreAgreement:
    """Agreement by the store of the default group, for one save; any thread may call it.

    ``name`` tells the save from all others of the run. Raises TimeoutError where a rank does not come for
    ``timeout_s``, RuntimeError where the store is gone.
    """

    def __init__(self, store: Store, name: str, timeout_s: float) -> None:
        self._store, self._name, self._timeout_s = store, name, timeout_s
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._calls, self._deadline_s = 0, math.inf

    def gather(self, mine: Any) -> list[Any]:
        prefix = f"{self._name}/{self._calls}"
        self._calls += 1
        self._store.set(f"{prefix}/{self._rank}", json.dumps(mine))
        self._meet(f"{prefix}/count")
        return [json.loads(self._store.get(f"{prefix}/{rank}")) for rank in range(self._ranks)]

    def barrier(self) -> None:
        self.gather(None)

    def leave(self) -> None:
        """End the agreement; rank 0, whose process may hold the store, waits for the others."""
        self._store.add(f"{self._name}/left", 1)
        if self._rank == 0:
            self._wait(f"{self._name}/left", time.monotonic() + LEAVING_S)

    def hurry(self, timeout_s: float) -> None:
        """Wait for others no longer than ``timeout_s`` from now on."""
        self._deadline_s = time.monotonic() + timeout_s

    def _meet(self, key: str) -> None:
        self._store.add(key, 1)
        if not self._wait(key, time.monotonic() + self._timeout_s):
            missing = self._ranks - self._store.add(key, 0)
            raise TimeoutError(f"{missing} of {self._ranks} ranks have not written their files in time")

    def _wait(self, key: str, deadline_s: float) -> bool:
        pause = 0.001
        while self._store.add(key, 0) < self._ranks:
            if time.monotonic() > min(deadline_s, self._deadline_s):
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return True
