"""What context-parallel attention is estimated to send, against what its ranks do send."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from context_rule import HEADS
from ranks import run_on_ranks

from ds_npu.config.context_parallel import ContextParallelSection, algorithms
from ds_npu.models.plan import AttentionShape
from ds_npu.ops.attention import CAUSAL, Options
from ds_npu.parallel.context import transfer
from ds_npu.parallel.context.attention import context_attention
from ds_npu.parallel.context.axis import context_axis
from ds_npu.parallel.context.load_balance import shard_evenly
from ds_npu.parallel.context.ulysses import share_heads
from ds_npu.planner.context_choice import algorithm_text
from ds_npu.planner.context_cost import Layer, Pass, layer_cost, shared_heads
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.machine import A2
from ds_npu.topology.topology import Topology

LENGTH, SAMPLES = 32, 2


class Counted:
    """Bytes that this rank sends to others, and in how many messages and collectives."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes = self.messages = 0
        self.wrap(patch, dist, "all_to_all_single", self.exchanged)
        self.wrap(patch, transfer, "send_receive", lambda ring, hop, flat, *rest: flat.nbytes)
        self.wrap(patch, transfer, "gather_parts", lambda parts, x, group: x.nbytes * (len(parts) - 1))
        self.wrap(patch, transfer, "scatter_parts", lambda mine, parts, group: mine.nbytes * (len(parts) - 1))

    def wrap(self, patch, module, name, sent):
        real = vars(module)[name]

        def counting(*args, **kwargs):
            self.bytes, self.messages = self.bytes + sent(*args, **kwargs), self.messages + 1
            return real(*args, **kwargs)

        patch.setattr(module, name, counting)

    @staticmethod
    def exchanged(received, given, from_each, to_each, group, async_op):
        return sum(size for rank, size in enumerate(to_each) if rank != dist.get_rank(group)) * given.element_size()

    def take(self):
        found, self.bytes, self.messages = (self.bytes, self.messages), 0, 0
        return found


def estimated(one_pass: Pass) -> tuple[float, int]:
    return one_pass.near_bytes + one_pass.far_bytes, one_pass.messages


def counted_is_estimated(size: int, dtype: torch.dtype) -> None:
    topology = Topology(Degrees(cp=size))
    with pytest.MonkeyPatch.context() as patch:
        count = Counted(patch)
        for kv_cache in ("none", "half", "full"):
            for algorithm in algorithms(ContextParallelSection(kv_cache=kv_cache), size):
                axis, tokens = context_axis(topology, algorithm), shard_evenly(LENGTH, algorithm)
                for name, (heads, key_heads, width, value_width) in HEADS.items():
                    shapes = [(heads, width), (key_heads, width), (key_heads, value_width)]
                    q, k, v = (
                        torch.randn(SAMPLES, tokens.count(axis.rank), *shape, dtype=dtype, requires_grad=True)
                        for shape in shapes
                    )
                    shape = AttentionShape(heads, key_heads, width, value_width)
                    layer = Layer(shape, LENGTH, SAMPLES, dtype.itemsize)
                    expected = layer_cost(layer, algorithm, topology.degrees, A2)
                    out = context_attention(q, k, v, axis, Options("BSND", CAUSAL), tokens)
                    where = f"{algorithm_text(algorithm)}, {kv_cache}, {name}"
                    assert count.take() == estimated(expected.forward), f"forward of {where}"
                    out.sum().backward()
                    assert count.take() == estimated(expected.backward), f"backward of {where}"


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (4, torch.float32)], ids=str)
def test_ranks_send_what_is_estimated(size, dtype):
    run_on_ranks(size, counted_is_estimated, size, dtype)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 7, 12, 32])
def test_heads_are_shared_as_the_exchange_shares_them(heads):
    for key_heads in (each for each in range(1, heads + 1) if heads % each == 0):
        for ranks in range(1, heads + 1):
            shared = share_heads(heads, key_heads, ranks)
            lengths = tuple([len(each) for each in ranges] for ranges in (shared.queries, shared.keys))
            assert shared_heads(AttentionShape(heads, key_heads, 4, 4), 1, ranks) == lengths
