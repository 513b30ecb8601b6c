"""HCCL's communicators of a group of ranks and of two of them: torch_npu opens them when they are first used.

Asking for the name of a group's communicator opens it: the ranks connect and HCCL takes its buffers; nothing is sent,
and no stream waits. Communicators of two ranks have no name: sending a number opens them. Source: torch_npu 2.13,
ProcessGroupHCCL::getHcclCommName and createHCCLComm.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_npu.log import logger


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
    return _opened(name, dist.get_process_group_ranks(group), lambda: communicator(group))


class Link(NamedTuple):
    """Messages from one rank of a group to another; ranks are global."""

    group: dist.ProcessGroup
    sender: int
    receiver: int


def open_links(links: Iterable[Link], name: str) -> None:
    """Open the communicators of those ``links`` over hccl in which this rank takes part; each has a line in the log.

    Every rank is given all links of a group in the same order, so that none waits in a circle. Raises RuntimeError
    where the other rank does not come.
    """
    own = dist.get_rank()
    for link in (each for each in links if own in (each.sender, each.receiver)):
        if dist.get_backend(link.group) == "hccl":
            ranks = (link.sender, link.receiver)
            seconds = _opened(f"{name}, rank {ranks[0]} to rank {ranks[1]}", ranks, functools.partial(_pass, link))
            logger().info("HCCL communicator of two, %s: rank %d to rank %d, opened in %.2f s", name, *ranks, seconds)


def _pass(link: Link) -> None:
    """Send a number over ``link``, or receive it; the host does not wait for it."""
    number = torch.zeros(1, device="npu")
    if dist.get_rank() == link.sender:
        dist.send(number, link.receiver, group=link.group)
    else:
        dist.recv(number, link.sender, group=link.group)


def _opened(name: str, ranks: Sequence[int], action: Callable[[], object]) -> float:
    """The seconds of ``action``, which opens the communicator ``name`` of ``ranks``."""
    store, begun = _store(), time.monotonic()
    key = f"ds_npu opens {name} of {ranks[0]}"
    store.set(f"{key}: {dist.get_rank()}", "1")
    try:
        action()
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
