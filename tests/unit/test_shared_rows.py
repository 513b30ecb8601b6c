"""Which rank computes which rows of an expert, where ranks share experts with many rows."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_npu.parallel.expert.sharing import shared_rows, slots_of_rows


@st.composite
def routings(draw) -> tuple[list[torch.Tensor], int, int]:
    """The ids of each sending rank [T, K], the ranks along ep, and the experts."""
    ranks, local, choices = draw(st.sampled_from([2, 3, 4])), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    experts = ranks * local
    popular = st.sampled_from([-1, 0, 0, 0, *range(experts)])
    rows = st.lists(st.lists(popular, min_size=choices, max_size=choices), max_size=12)
    sent = [torch.tensor(draw(rows), dtype=torch.int64).view(-1, choices) for _ in range(ranks)]
    return sent, ranks, experts


def pairs(ids: list[torch.Tensor], experts: int) -> list[list[int]]:
    return [[int((each == expert).sum()) for expert in range(experts)] for each in ids]


@given(routings(), st.integers(1, 5))
def test_every_row_goes_to_a_rank_that_holds_its_expert(case, least):
    ids, ranks, experts = case
    counts = pairs(ids, experts)
    plan = shared_rows(counts, ranks, least)
    assert plan == shared_rows(counts, ranks, least)
    local = experts // ranks
    before = [sum(map(sum, (each[r * local : (r + 1) * local] for each in counts))) for r in range(ranks)]
    if not plan.spare:
        assert all(parts == ((e // local, sum(each[e] for each in counts)),) for e, parts in enumerate(plan.rows))
        return
    where = {plan.slot(expert, rank): expert for expert, parts in enumerate(plan.rows) for rank, _ in parts}
    found = [slots_of_rows(each, plan.map_of(counts, rank)) for rank, each in enumerate(ids)]
    for sent, slots in zip(ids, found, strict=True):
        assert [where.get(slot, -1) for slot in slots.flatten().tolist()] == sent.flatten().tolist()
    done = Counter(slot for slots in found for slot in slots.flatten().tolist() if slot >= 0)
    for expert, parts in enumerate(plan.rows):
        assert [done[plan.slot(expert, rank)] for rank, _ in parts] == [rows for _, rows in parts]
        assert all(rows >= least for _, rows in parts[1:])
    after = [sum(done[rank * plan.slots + index] for index in range(plan.slots)) for rank in range(ranks)]
    assert sum(after) == sum(before) and max(before) - max(after) >= least
    assert all(len(each) <= local for each in plan.replicas)


@given(routings())
def test_ranks_compute_the_same_number_of_rows(case):
    """A replica of one row pays if least is 1; a rank may have as many replicas as experts."""
    ids, ranks, experts = case
    counts = pairs(ids, experts)
    plan = shared_rows(counts, ranks, 1)
    if not plan.spare or any(len(each) == experts // ranks for each in plan.replicas):
        return
    loads = Counter()
    for rank, rows in itertools.chain(*plan.rows):
        loads[rank] += rows
    assert max(loads.values()) == -(-sum(map(sum, counts)) // ranks)


def test_it_pays_or_nothing_is_shared():
    even = [[10, 10, 10, 10]] * 2
    assert not shared_rows(even, 2, 1).spare
    # 140 rows and 20: 60 go, for one replica.
    uneven = [[60, 10, 5, 5]] * 2
    assert not shared_rows(uneven, 2, 61).spare
    plan = shared_rows(uneven, 2, 60)
    assert plan.rows == (((0, 60), (1, 60)), ((0, 20),), ((1, 10),), ((1, 10),))
    assert plan.replicas == ((), (0,)) and plan.slots == 3
    # One rank becomes lighter, and another as heavy as it cannot.
    loads = [[40, 0, 0, 0, 10, 10, 10, 10, *[0] * 8]]
    assert not shared_rows(loads, 4, 11).spare and shared_rows(loads, 4, 10).spare
