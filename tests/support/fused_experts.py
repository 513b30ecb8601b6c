"""Experts fused with their all-to-alls: a stand-in for torch_npu's kernels, and layers that use it."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, contextmanager
from unittest import mock

import expert_cases
import torch
import torch.distributed as dist
from expert_cases import ExpertOptions, LayerCase, Layout, Numbers, check_layer

from ds_npu.ops import expert_exchange
from ds_npu.parallel.expert import fused
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

LAYOUTS = (Layout(), Layout(is_transposed=True), Layout(has_gate=False))


class GlooKernels:
    """Row by row, as CANN's pages describe the kernels."""

    def __init__(self) -> None:
        self.calls = 0

    def alltoall_matmul(self, x, weight, group, sent, received):
        self.calls += 1
        experts, ranks = len(weight), dist.get_world_size(group)
        rows = self._exchanged(x, sent, received, group, experts)
        begins = [0, *itertools.accumulate(received)]
        by_expert = [
            rows[begins[rank * experts + expert] : begins[rank * experts + expert + 1]]
            for expert in range(experts)
            for rank in range(ranks)
        ]
        products = [each @ weight[index // ranks] for index, each in enumerate(by_expert)]
        return torch.cat(products), torch.cat(by_expert)

    def matmul_alltoall(self, x, weight, group, sent, received):
        self.calls += 1
        experts, ranks = len(weight), dist.get_world_size(group)
        parts, begin = {}, 0
        for expert, rank in itertools.product(range(experts), range(ranks)):
            count = received[rank * experts + expert]
            parts[rank, expert] = x[begin : begin + count] @ weight[expert]
            begin += count
        by_rank = torch.cat([parts[each] for each in sorted(parts)])
        return self._exchanged(by_rank, received, sent, group, experts)

    @staticmethod
    def _exchanged(x, sent, received, group, experts):
        sent, received = (
            [sum(each[i : i + experts]) for i in range(0, len(each), experts)] for each in (sent, received)
        )
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out


@contextmanager
def stand_in():
    """Kernels that take everything, on the CPU."""
    kernels = GlooKernels()
    patched = [
        (fused, "exchange_kernels", lambda: kernels),
        (fused, "communicator", lambda group: group),
        (expert_exchange, "unmet", lambda *_: None),
        (expert_exchange, "unmet_bytes", lambda _: None),
    ]
    with ExitStack() as stack:
        for each in patched:
            stack.enter_context(mock.patch.object(*each))
        yield kernels


def check_world(degrees: Degrees) -> None:
    """Every routing and layout is the loop over experts; with biases too, which are not fused."""
    topology = Topology(degrees)
    cases = itertools.product(expert_cases.ROUTINGS, LAYOUTS, [ExpertOptions("fused")], {False, degrees.tp > 1})
    with stand_in() as kernels:
        for count, each in enumerate(cases, 1):
            check_layer(topology, LayerCase(*each), Numbers())
            # Two in forward, and two in backward.
            assert kernels.calls == 4 * count
        biased = LayerCase("any", expert_cases.LAYOUTS["transposed with biases"], ExpertOptions("fused"), False)
        check_layer(topology, biased, Numbers())
        assert kernels.calls == 4 * count
