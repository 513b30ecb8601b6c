"""HCCL's communicator of a group of ranks: torch_npu opens it when it is first used, or asked for by name.

Opening connects the ranks and takes the buffers; nothing is sent, and no stream waits. Source: torch_npu 2.13,
ProcessGroupHCCL::getHcclCommName and createHCCLComm.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist


@functools.cache
def communicator(group: dist.ProcessGroup) -> str:
    """HCCL's name of the group's communicator, which is opened if it is not yet open."""
    name: str = _backend(group).get_hccl_comm_name(dist.get_rank())
    return name


def is_open(group: dist.ProcessGroup) -> bool:
    """Whether the group's communicator has been opened."""
    return bool(_backend(group).get_hccl_comm_name(dist.get_rank(), init_comm=False))


def hccl_config_of(group: dist.ProcessGroup) -> dict[str, Any]:
    """The ``hccl_config`` with which the group's communicator is opened, or was."""
    return dict(_backend(group).options.hccl_config)


def add_to_hccl_config(group: dist.ProcessGroup, config: Mapping[str, int]) -> None:
    """Add ``config`` to the ``hccl_config`` of a communicator that is not yet open."""
    _backend(group).options.hccl_config = {**hccl_config_of(group), **config}


def open_communicator(group: dist.ProcessGroup, name: str) -> float:
    """Open the group's communicator, which all of its ranks do in the same order; returns the seconds it took.

    Raises RuntimeError, with the ranks that did not begin to open it, where they do not all come.
    """
    ranks, store, begun = dist.get_process_group_ranks(group), _store(), time.monotonic()
    key = f"ds_npu opens {name} of {ranks[0]}"
    store.set(f"{key}: {dist.get_rank()}", "1")
    try:
        communicator(group)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} could not open the HCCL communicator {name} of ranks {_listed(ranks)} within "
            f"{time.monotonic() - begun:.0f} s. {_missing(store, key, ranks)} What to do: see what these ranks "
            "printed and whether they run, and whether their hosts reach each other; HCCL_CONNECT_TIMEOUT (120) is the "
            f"seconds that a rank waits. HCCL said: {error}"
        ) from error
    return time.monotonic() - begun


def _missing(store: Any, key: str, ranks: Sequence[int]) -> str:
    try:
        missing = [rank for rank in ranks if not store.check([f"{key}: {rank}"])]
    except RuntimeError:
        return "Which ranks did not begin to is not known: the store of the process group is gone."
    return f"Not begun by ranks {_listed(missing)}." if missing else "All of them have begun to."


def _listed(ranks: Sequence[int]) -> str:
    shown = ranks if len(ranks) <= MOST_SHOWN else [*ranks[: MOST_SHOWN - 1], "...", ranks[-1]]
    return ", ".join(map(str, shown))


MOST_SHOWN = 16
"""Most ranks that an error lists."""


def _backend(group: dist.ProcessGroup) -> Any:
    """torch_npu's ProcessGroupHCCL."""
    return group._get_backend(torch.device("npu"))


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
