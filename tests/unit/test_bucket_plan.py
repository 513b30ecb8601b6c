"""Buckets of a flat buffer and the exchange of partitions, against arrays of positions."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_npu.zero_ext.bucket_plan import BucketPlan, bucket_elements, plan_of
from ds_npu.zero_ext.partition_exchange import transfers_of


@st.composite
def buffers(draw: st.DrawFn) -> tuple[BucketPlan, int, int, int]:
    """A plan, its ranks, the elements of the buffer and of a bucket; weights with gaps between them."""
    ranks, shard = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    weights, end = [], 0
    for gap, numel in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=6)):
        weights.append((end + gap, numel))
        end += gap + numel
    numel = -(-max(end, 1) // ranks) * ranks
    return plan_of(weights, numel, ranks, ranks * shard), ranks, numel, ranks * shard


def partitions(numel: int, ranks: int, bucket: int) -> torch.Tensor:
    """[ranks, elements]: the positions in the buffer that each rank owns."""
    positions = torch.arange(numel)
    return torch.cat([each.view(ranks, -1) for each in positions.split(bucket)], dim=1)


@given(buffers())
def test_runs_are_the_weights_in_a_ranks_part_of_each_bucket(buffer):
    plan, ranks, numel, bucket = buffer
    owned = partitions(numel, ranks, bucket)
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
    plan, _, _, bucket = buffer
    for index, (start, numel) in enumerate(plan.weights):
        found = [
            (piece.bucket * bucket + piece.start + each, piece.first + each)
            for piece in plan.pieces(index)
            for each in range(piece.numel)
        ]
        assert found == [(start + each, each) for each in range(numel)]


@given(buffers())
def test_transfers_lead_from_one_order_to_the_other(buffer):
    plan, ranks, numel, bucket = buffer
    owned, plain = partitions(numel, ranks, bucket), torch.full((ranks, numel // ranks), -1)
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
