"""Faults planted in what context-parallel attention sends: prints, for each, whether wrong numbers were seen.

ds_npu sim --chaos 1 --devices 4 -- env PYTHONPATH=.:tests/support python tests/npu/context_faults.py
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import torch
import torch.distributed as dist
import torch_npu
from context_cases import CASES, algorithms, axes, check
from ranks import run_on_ranks

from ds_npu.comm.pending import Pending
from ds_npu.parallel.context import transfer
from ds_npu.parallel.context.axis import Ring
from ds_npu.parallel.context.ring_schedule import Hop

PRIVATE_USE = 20
"""c10's number of what NPUs are to it."""

KEYS = transfer.KEYS_AND_VALUES
Coming = Pending[torch.Tensor]
SendReceive = Callable[[Ring, Hop, torch.Tensor, torch.Tensor, int], Coming]


def unwaited(of: Callable[[Hop, int], bool]) -> Callable[[SendReceive], SendReceive]:
    """What comes is read before it is there."""

    def plant(right: SendReceive) -> SendReceive:
        def wrong(ring: Ring, hop: Hop, flat: torch.Tensor, empty: torch.Tensor, tag: int) -> Coming:
            pending = right(ring, hop, flat, empty, tag)
            return Pending(empty, None) if of(hop, tag) else pending

        return wrong

    return plant


def overwritten(right: SendReceive) -> SendReceive:
    """What is sent is changed before it has gone."""

    def wrong(ring: Ring, hop: Hop, flat: torch.Tensor, empty: torch.Tensor, tag: int) -> Coming:
        pending = right(ring, hop, flat, empty, tag)
        flat.zero_()
        return pending

    return wrong


def freed(right: SendReceive) -> SendReceive:
    """What is sent is freed before it has gone, and its memory is given to others."""

    def wrong(ring: Ring, hop: Hop, flat: torch.Tensor, empty: torch.Tensor, tag: int) -> Coming:
        if hop.link == "home":
            return right(ring, hop, flat, empty, tag)
        copied = flat.clone()
        pending = right(ring, hop, copied, empty, tag)
        groups = ring.inner if hop.link == "inner" else ring.outer
        at = (ring.rank % ring.window if hop.link == "inner" else ring.rank // ring.window) % 2
        peer = dist.get_group_rank(groups[at], ring.ranks[hop.to])
        device = flat.device
        stream_id = groups[at]._get_backend(device).get_p2p_stream_id(device, peer, 0)
        stream = torch.npu.Stream(stream_id=stream_id, device_index=device.index, device_type=PRIVATE_USE)
        torch_npu.erase_stream(copied, stream)
        pending._work.works = [pending._work.works[1 - at]]
        pending._sent = flat
        del copied
        torch.full_like(flat, 7.0)
        return pending

    return wrong


def no_wait(self: Pending[torch.Tensor]) -> torch.Tensor:
    return self._finish(self._value)


def in_ring(plant: Callable[[SendReceive], SendReceive]) -> tuple[str, AbstractContextManager[object]]:
    return "double ring", mock.patch.object(transfer, "send_receive", plant(transfer.send_receive))


FAULTS: dict[str, tuple[str, AbstractContextManager[object]]] = {
    "none": ("double ring", nullcontext()),
    "keys are not waited for": in_ring(unwaited(lambda hop, tag: tag == KEYS and hop.link == "inner")),
    "keys of the next ring are not waited for": in_ring(unwaited(lambda hop, tag: hop.link == "outer")),
    "gradients are not waited for": in_ring(unwaited(lambda hop, tag: tag != KEYS and hop.link == "inner")),
    "gradients are not waited for at home": in_ring(unwaited(lambda hop, tag: hop.link == "home")),
    "what is sent is overwritten": in_ring(overwritten),
    "what is sent is freed": in_ring(freed),
    "the exchange of heads is not waited for": ("ulysses", mock.patch.object(Pending, "wait", no_wait)),
    "the gathering is not waited for": ("all-gather", mock.patch.object(Pending, "wait", no_wait)),
}


def body(fault: str) -> None:
    name, planted = FAULTS[fault]
    (axis,) = axes(algorithms(4)[name])
    with planted:
        for case in CASES:
            check(axis, case, torch.float32)


def main() -> None:
    for fault in FAULTS:
        try:
            run_on_ranks(4, body, fault, backend="hccl")
        except torch.multiprocessing.ProcessRaisedException as error:
            wrong = "largest error" in str(error)
            print(f"{fault}: {'wrong numbers' if wrong else error}", flush=True)
        else:
            print(f"{fault}: right", flush=True)


if __name__ == "__main__":
    main()
