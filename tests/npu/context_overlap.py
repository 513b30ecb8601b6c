"""A ring's attention on NPUs whose streams are recorded, twice: the first opens the communicators.

    ds_npu sim --devices 4 --trace FOLDER -- env PYTHONPATH=.:tests/support python \
        tests/npu/context_overlap.py WINDOW [late]

``late``: each message is handed to its stream after what should hide it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from unittest import mock

import torch
from context_cases import axes
from ranks import run_on_ranks

from ds_npu.comm.pending import Pending
from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.ops.attention import CAUSAL, Options
from ds_npu.parallel.context import transfer
from ds_npu.parallel.context.attention import context_attention
from ds_npu.parallel.context.ring_schedule import Step

RANKS = 4
SHAPE = (1, 512, 4, 64)
"""Of each rank. Large enough that a block takes much longer than a thread takes to wake up."""


def late_blocks(self: transfer.RingRoute, own: transfer.Block) -> Iterator[tuple[Step, transfer.Block]]:
    held = {self.ring.rank: Pending(transfer.flatten_block(own), None)}
    for step in self.steps:
        flat = held.pop(step.source).wait()
        yield step, transfer.unflatten_block(flat, own, self.counts[step.source])
        for hop in step.hops:
            empty = torch.empty_like(flat)
            held[hop.received] = transfer.send_receive(self.ring, hop, flat, empty, transfer.KEYS_AND_VALUES)


def body(window: int, late: bool) -> None:
    (axis,) = axes(ContextAlgorithm(ring=RANKS, window=window))
    with mock.patch.object(transfer.RingRoute, "blocks", late_blocks if late else transfer.RingRoute.blocks):
        for _ in range(2):
            q, k, v, dout = (torch.randn(SHAPE, device="npu", dtype=torch.bfloat16) for _ in range(4))
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = context_attention(*leaves, axis, Options(mask=CAUSAL))
            torch.autograd.grad(out, leaves, dout)
    torch.npu.synchronize()


if __name__ == "__main__":
    run_on_ranks(RANKS, body, int(sys.argv[1]), "late" in sys.argv, backend="hccl")
