"""A ring's messages never wait for each other in a circle: HCCL's send ends when it has been received, not before."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from context_cases import axes, check
from context_rule import Case
from hccl_ranks import endings

from ds_npu.comm.pending import Pending, Works
from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.ops.attention import CAUSAL, sliding
from ds_npu.parallel.context import transfer
from ds_npu.parallel.context.axis import Ring
from ds_npu.parallel.context.ring_schedule import Hop

RINGS = [(2, 1), (3, 1), (4, 1), (4, 2), (6, 2), (6, 3), (8, 1), (8, 4)]
"""Ranks, and ranks of an inner ring (1: a single ring)."""


def all_send_first(ring: Ring, hop: Hop, flat: torch.Tensor, empty: torch.Tensor, tag: int) -> Pending[torch.Tensor]:
    """Through one communicator."""
    works = [
        dist.isend(flat, ring.ranks[hop.to], group=ring.group),
        dist.irecv(empty, ring.ranks[hop.origin], group=ring.group),
    ]
    return Pending(empty, Works(works), sent=flat)


def body(window: int, send_first: bool) -> None:
    """Of the window only some steps are made, after which gradients go home across the ring."""
    (axis,) = axes(ContextAlgorithm(ring=dist.get_world_size(), window=window))
    length = 4 * axis.size
    with mock.patch.object(transfer, "send_receive", all_send_first if send_first else transfer.send_receive):
        for case in (Case("gqa", CAUSAL, length=length), Case("mha", sliding(2), length=length)):
            check(axis, case, torch.bfloat16)


@pytest.mark.parametrize("buffer_mib", ["20", "0"], ids=["a communicator for each pair", "one for each group"])
def test_no_circle(buffer_mib):
    for world, window in RINGS:
        ended = endings(world, body, window, False, P2P_HCCL_BUFFSIZE=buffer_mib, HCCL_EXEC_TIMEOUT="20")
        assert [each.code for each in ended] == [0] * world, (world, window, ended)


def test_a_circle_is_found():
    for each in endings(2, body, 1, True, P2P_HCCL_BUFFSIZE="0", HCCL_EXEC_TIMEOUT="2"):
        assert each.code == 3 and each.waited_s > 1.9, each
