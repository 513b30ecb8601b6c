"""Plans of whole matrices: every element reaches the owner of its matrix, and its update all that hold it.

Weights are made of element numbers, sharded and partitioned here by slicing; ranks exchange by the messages of a plan.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_npu.parallel.whole_matrices import plan as plans
from ds_npu.parallel.whole_matrices.pieces import WeightHolding, dims_of, matrices_of
from ds_npu.parallel.whole_matrices.plan import PortionPlan, owners_of, plan_of_portion, shapes_of

UPDATED = 10**6


@st.composite
def weights(draw):
    """The shape, heads, sharded dim and ranges of tensor ranks of one weight."""
    tp = draw(st.shared(st.integers(1, 3), key="tp"))
    heads = draw(st.sampled_from([0, 0, 2]))
    shape = [draw(st.integers(1, 5)) * (2 if heads else 1), draw(st.integers(1, 6))]
    if draw(st.booleans()):
        shape.insert(0, draw(st.integers(1, 3)))
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    ranges = None
    if dim is not None:
        # Two sections, each cut anywhere, as fused weights are; ranks may have nothing.
        middle = draw(st.integers(0, shape[dim]))
        sections = []
        for low, high in ((0, middle), (middle, shape[dim])):
            cuts = sorted(draw(st.lists(st.integers(low, high), min_size=tp - 1, max_size=tp - 1)))
            sections.append(list(zip([low, *cuts], [*cuts, high], strict=True)))
        ranges = [tuple(section[rank] for section in sections) for rank in range(tp)]
    return tuple(shape), heads, dim, ranges


def held_by(given_weights, tp: int, dp: int, is_partitioned: bool):
    """Descriptions and flat tensors of all ranks (tp fastest), the tensors filled with the numbers of elements."""
    held, flats, base = [[] for _ in range(dp * tp)], [], 0
    shards = [[] for _ in range(tp)]
    for shape, _, dim, ranges in given_weights:
        whole = torch.arange(base, base + math.prod(shape)).view(shape)
        base += math.prod(shape)
        for rank in range(tp):
            parts = [whole] if dim is None else [whole.narrow(dim, a, b - a) for a, b in ranges[rank]]
            shards[rank].append(torch.cat(parts, dim=dim or 0).flatten())
    for rank in range(dp * tp):
        d, t = divmod(rank, tp)
        flat = torch.cat([*shards[t], torch.full([-sum(map(len, shards[t])) % dp], -1)])
        size = len(flat) // dp if is_partitioned else len(flat)
        begin = d * size if is_partitioned else 0
        flats.append(flat[begin : begin + size].clone())
        offset = 0
        for index, (shape, heads, dim, ranges) in enumerate(given_weights):
            numel = len(shards[t][index])
            start, stop = max(offset, begin), min(offset + numel, begin + size)
            if start < stop:
                own = [((0, length),) for length in dims_of(shape)]
                if dim is not None:
                    own[dim + 3 - len(shape)] = ranges[t]
                copy = (*(() if is_partitioned else (d,)), *((t,) if dim is None else ()))
                run = (start - offset, stop - start, 0, start - begin, 0)
                held[rank].append(WeightHolding(f"w{index}", shape, *own, *run, copy, heads))
            offset += numel
    return held, flats


def run(plan: PortionPlan, flats: list[torch.Tensor]) -> list[int]:
    """Exchange and update ``flats``; returns the matrices in the order of their iterations."""
    iterated, waves = [], [plan.waves_of(rank) for rank in range(plan.ranks)]
    for each in zip(*waves, strict=True):
        owned = sent_between(each, flats, "sent", "received")
        wholes = []
        for rank, wave in enumerate(each):
            own = [torch.full((matrix.rows, matrix.columns), -7) for matrix in wave.matrices]
            fill(own, wave.received.pieces, owned[rank])
            wholes.append([[whole + UPDATED for whole in own]])
            iterated += wave.matrices
            assert [matrix.form for matrix in wave.matrices] == sorted(matrix.form for matrix in wave.matrices)
        back = [torch.full((sum(wave.returned.counts),), -7) for wave in each]
        for rank, wave in enumerate(each):
            fill(wholes[rank][0], wave.returned.pieces, back[rank], reverse=True)
        back = transported([wave.returned.counts for wave in each], [wave.updated.counts for wave in each], back)
        for rank, wave in enumerate(each):
            at = 0
            for _, piece in wave.updated.pieces:
                flats[rank][piece.start : piece.start + piece.numel] = back[rank][at : at + piece.numel]
                at += piece.numel
    return iterated


def sent_between(waves, flats, sent, received):
    parts = [
        torch.cat([flats[rank][:0], *(flats[rank][p.start : p.start + p.numel] for _, p in wave.sent.pieces)])
        for rank, wave in enumerate(waves)
    ]
    counts = [[getattr(wave, name).counts for wave in waves] for name in (sent, received)]
    return transported(*counts, parts)


def transported(to, of, parts):
    ranks = range(len(parts))
    assert all(to[a][b] == of[b][a] for a in ranks for b in ranks), "both ends count the same"
    pieces = [part.split(list(counts)) for part, counts in zip(parts, to, strict=True)]
    return [torch.cat([pieces[a][b] for a in ranks]) for b in ranks]


def fill(wholes, pieces, flat, reverse=False):
    at = 0
    for slot, piece in pieces:
        seen = 0
        for tile in piece.tiles:
            for row in range(tile.rows):
                first = at + tile.start + row * tile.width + tile.column_in_piece
                inside = wholes[slot][tile.row + row, tile.column : tile.column + tile.columns]
                outside = flat[first : first + tile.columns]
                outside.copy_(inside) if reverse else inside.copy_(outside)
                seen += tile.columns
        assert seen == piece.numel
        at += piece.numel


@settings(deadline=None, max_examples=150)
@given(
    st.lists(weights(), min_size=1, max_size=4),
    st.shared(st.integers(1, 3), key="tp"),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([1, 12, plans.WAVE]),
)
def test_every_element_comes_and_goes_once(given_weights, tp, dp, is_partitioned, wave):
    held, flats = held_by(given_weights, tp, dp, is_partitioned)
    before = [flat.clone() for flat in flats]
    usual, plans.WAVE = plans.WAVE, wave
    try:
        plan = plan_of_portion(held, {shape: float(shape[0] * shape[1]) for shape in shapes_of(held)})
    finally:
        plans.WAVE = usual
    iterated = run(plan, flats)
    assert sorted(iterated) == sorted(plan.matrices) and len(set(iterated)) == len(iterated)
    for flat, old in zip(flats, before, strict=True):
        assert torch.equal(flat, torch.where(old >= 0, old + UPDATED, old))
    # The owner has a piece; what it lacks comes once, and what others hold goes to them.
    for matrix, owner in enumerate(plan.owners):
        assert any(piece.rank == owner for piece in plan.pieces[matrix])
    one_copy = sum(matrix.rows * matrix.columns for matrix in plan.matrices)
    assert plan.sent_elements()[0] <= one_copy


def test_halves_of_two_tensor_ranks_send_half_of_each_matrix():
    given_weights = [((8, 4), 0, index % 2, [((0, n), (n, n)), ((n, 2 * n),)]) for index, n in enumerate((4, 2, 4, 2))]
    held, _ = held_by(given_weights, 2, 1, False)
    plan = plan_of_portion(held, {(8, 4): 1.0})
    assert sorted(plan.owners) == [0, 0, 1, 1] and plan.loads() == [2.0, 2.0]
    assert plan.sent_elements() == (4 * 16, 4 * 16)


def test_matrices_in_one_partition_do_not_travel():
    given_weights = [((4, 4), 0, None, None)] * 4
    held, _ = held_by(given_weights, 1, 2, True)
    plan = plan_of_portion(held, {(4, 4): 1.0})
    assert plan.owners == (0, 0, 1, 1) and plan.sent_elements() == (0, 0)
    assert not any(wave.is_sent for wave in plan.waves_of(0))


def test_owners_are_balanced_by_cost_and_no_rank_needs_a_matrix():
    held, _ = held_by([((size, 4), 0, None, None) for size in (6, 5, 5, 3, 3, 2)], 1, 3, False)
    plan = plan_of_portion(held, {shape: float(shape[0] * 4) for shape in shapes_of(held)})
    assert sorted(plan.loads()) == [32.0, 32.0, 32.0]
    held, _ = held_by([((3, 3), 0, None, None)], 1, 3, False)
    assert sorted(plan_of_portion(held, {(3, 3): 1.0}).loads()) == [0.0, 0.0, 1.0]
    assert owners_of([], [], 3) == ()


def test_kernels_of_convolutions_are_rows_of_all_else():
    weight = WeightHolding("conv", (6, 3, 2, 2), ((0, 1),), ((0, 6),), ((0, 12),), 0, 72, 0, 0, 0)
    (matrix,) = matrices_of(weight)
    assert matrix.form == (6, 12, (2, 2))


def test_errors_name_the_weight():
    held, _ = held_by([((4, 4), 0, None, None)], 1, 2, True)
    with pytest.raises(ValueError, match="w0 has matrices of 4 x 4, of which the ranks hold"):
        plan_of_portion([held[0], []], {(4, 4): 1.0})
    with pytest.raises(ValueError, match="w0: 4 rows do not divide into matrices of 3"):
        list(matrices_of(WeightHolding("w0", (4, 4), ((0, 1),), ((0, 4),), ((0, 4),), 0, 16, 0, 0, 0, (), 3)))
    with pytest.raises(ValueError, match="has 1 dims"):
        dims_of((4,))
