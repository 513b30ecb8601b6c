"""Buckets of a flat buffer and the exchange of partitions, against arrays of positions."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_npu.zero_ext import bucket_plan
from ds_npu.zero_ext.bucket_plan import BucketPlan, bucket_elements, plan_of
from ds_npu.zero_ext.partition_exchange import transfers_of


@st.composite
def buffers(draw: st.DrawFn) -> tuple[BucketPlan, int, int, int]:
    """A plan, its ranks, the elements of the buffer and the limit of a bucket; weights with gaps between them."""
    ranks, limit = draw(st.integers(1, 5)), draw(st.integers(1, 60))
    weights, end = [], 0
    for gap, numel in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=6)):
        weights.append((end + gap, numel))
        end += gap + numel
    numel = -(-max(end, 1) // ranks) * ranks
    least = draw(st.integers(1, 60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_plan, "LEAST", least)
        patch.setattr(bucket_plan, "LEAST_OF_A_RANK", 1)
        return plan_of(weights, numel, ranks, [limit, limit + 1]), ranks, numel, limit


def partitions(plan: BucketPlan, ranks: int) -> torch.Tensor:
    """[ranks, elements]: the positions in the buffer that each rank owns."""
    parts = [torch.arange(each.start, each.start + each.numel).view(ranks, -1) for each in plan.buckets]
    return torch.cat(parts, dim=1)


@given(buffers())
def test_buckets_are_the_buffer_and_not_above_the_limit(buffer):
    plan, ranks, numel, limit = buffer
    assert torch.equal(partitions(plan, ranks).flatten().sort().values, torch.arange(numel))
    for each in plan.buckets:
        assert each.ranks == ranks
        # A rank has two elements of each, where there are as many.
        assert 0 < each.numel <= max(limit, 2 * ranks) and each.numel % ranks == 0
    owned = 0
    for each in plan.buckets:
        assert (each.owned, each.shard) == (owned, each.numel // ranks)
        owned += each.shard


@given(buffers())
def test_a_span_is_its_buckets_and_the_home_of_the_weights_inside(buffer):
    plan, ranks, _, _ = buffer
    inside = [range(span.start, span.start + span.numel) for span in plan.spans]
    by_span = [[each for each in plan.buckets if each.span == index] for index in range(len(plan.spans))]
    for positions, buckets in zip(inside, by_span, strict=True):
        assert [at for each in buckets for at in range(each.start, each.start + each.numel)] == list(positions)
    for index, (offset, size) in enumerate(plan.weights):
        found = plan.home(index)
        homes = [span for span, each in enumerate(inside) if set(range(offset, offset + size)) <= set(each)]
        if size and homes:
            assert found == (homes[0], offset - inside[homes[0]].start)
        elif size:
            assert found is None
    even = all(size % (2 * ranks) == 0 and offset % (2 * ranks) == 0 for offset, size in plan.weights)
    assert not even or all(plan.home(index) for index in range(len(plan.weights)))


def test_layers_of_llama_have_a_bucket_for_each_large_weight():
    hidden, wide = 4096, 11008
    sizes = [hidden * hidden] * 4 + [hidden * wide] * 3 + [hidden] * 2
    ends = list(itertools.accumulate(sizes * 4, initial=0))
    weights = list(zip(ends, sizes * 4, strict=False))
    for ranks in (8, 64, 256):
        plan = plan_of(weights, ends[-1], ranks, [500_000_000])
        assert all(plan.home(index) for index in range(len(weights))), ranks
        # Four layers have 810 million elements.
        assert len(plan.buckets) <= (21 if ranks < 64 else 13), (ranks, len(plan.buckets))
        assert min(each.numel for each in plan.buckets) >= 25_000_000
    few = plan_of(weights, ends[-1], 8, [16_777_216])
    assert all(few.home(index) for index in range(len(weights)))
    assert max(each.numel for each in few.buckets) <= 16_777_216


@given(buffers())
def test_runs_are_the_weights_in_a_ranks_part_of_each_bucket(buffer):
    plan, ranks, _, _ = buffer
    owned = partitions(plan, ranks)
    owner = {
        position: index for index, (start, size) in enumerate(plan.weights) for position in range(start, start + size)
    }
    for rank in range(ranks):
        found, end = {}, 0
        for run in plan.runs(rank):
            assert run.start >= end
            assert run.numel > 0
            end = run.start + run.numel
            found.update({run.start + each: (run.weight, run.first + each) for each in range(run.numel)})
        expected = {}
        for index, position in enumerate(owned[rank].tolist()):
            if position in owner:
                expected[index] = owner[position], position - plan.weights[owner[position]][0]
        assert found == expected


@given(buffers())
def test_pieces_are_a_weights_elements_by_bucket(buffer):
    plan, _, _, _ = buffer
    for index, (start, numel) in enumerate(plan.weights):
        found = [
            (plan.buckets[piece.bucket].start + piece.start + each, piece.first + each)
            for piece in plan.pieces(index)
            for each in range(piece.numel)
        ]
        assert found == [(start + each, each) for each in range(numel)]


@given(buffers())
def test_transfers_lead_from_one_order_to_the_other(buffer):
    plan, ranks, numel, _ = buffer
    owned, plain = partitions(plan, ranks), torch.full((ranks, numel // ranks), -1)
    for rank, start, other, first, size in transfers_of(plan):
        plain[other, first : first + size] = owned[rank, start : start + size]
    assert torch.equal(plain.flatten(), torch.arange(numel))


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(1, 64))
def test_a_bucket_is_not_above_the_limits_but_where_ranks_would_have_nothing(reduced, gathered, ranks):
    found = bucket_elements([reduced, gathered], ranks)
    assert found % (2 * ranks) == 0
    assert found <= max(min(reduced, gathered), 2 * ranks)
    large = min(reduced, gathered) >= 256 * ranks
    assert not large or found % (256 * ranks) == 0
    assert found <= max(40_000_000, 1_000_000 * ranks)
