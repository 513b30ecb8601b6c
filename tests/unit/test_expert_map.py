"""Where experts should be by their load, and which elements go where when they move."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_npu.parallel.expert.expert_map import (
    EVEN,
    PAYS,
    Elements,
    ExpertMap,
    HeldRange,
    MappedExperts,
    heaviest,
    map_by_load,
    moves_between,
    plain_map,
    sharding_of_map,
    slots_of,
)

RANKS = st.sampled_from([1, 2, 3, 4, 8])
LOCAL = st.integers(1, 5)


@st.composite
def loads_and_map(draw) -> tuple[list[int], ExpertMap]:
    ranks, local = draw(RANKS), draw(LOCAL)
    experts = draw(st.permutations(range(ranks * local)))
    loads = draw(st.lists(st.integers(0, 10_000), min_size=ranks * local, max_size=ranks * local))
    return loads, tuple(tuple(experts[rank * local : (rank + 1) * local]) for rank in range(ranks))


@given(loads_and_map())
def test_experts_move_where_it_pays(case):
    loads, before = case
    after = map_by_load(loads, before)
    assert sorted(itertools.chain(*after)) == list(range(len(loads)))
    assert [len(each) for each in after] == [len(each) for each in before]
    assert after == before or heaviest(loads, after) <= (1 - PAYS) * heaviest(loads, before)
    for was, now in zip(before, after, strict=True):
        assert all(expert == now[index] for index, expert in enumerate(was) if expert in now)
    assert map_by_load(loads, before) == after


def test_even_loads_stay_and_uneven_ones_are_evened():
    before = plain_map(8, 2)
    assert map_by_load([5] * 8, before) == before and map_by_load([0] * 8, before) == before
    # 104 of 200 on the first rank: an exchange would save less than the margin.
    assert map_by_load([28, 26, 25, 25, 25, 25, 23, 23], before) == before
    loads = [90, 80, 70, 60, 10, 20, 30, 40]
    assert heaviest(loads, before) == 300
    assert heaviest(loads, map_by_load(loads, before)) <= 200 * (1 + EVEN)
    # One expert with more than its share ends among the lightest others.
    loads = [100, 9, 9, 9, 1, 1, 1, 1]
    assert heaviest(loads, map_by_load(loads, before)) == 103


@given(loads_and_map())
def test_the_sharding_takes_and_assembles_what_places_say(case):
    _, expert_map = case
    sharding, experts = sharding_of_map(expert_map), sum(map(len, expert_map))
    whole = torch.arange(3 * experts).view(experts, 3)
    parts = [sharding.take(whole, rank) for rank in range(len(expert_map))]
    assert [tuple(part[:, 0].div(3).int().tolist()) for part in parts] == list(expert_map)
    assert torch.equal(sharding.assemble(parts), whole)
    slots = slots_of(expert_map)
    assert [list(itertools.chain(*expert_map))[slot] for slot in slots] == list(range(experts))


@given(loads_and_map(), st.integers(1, 7), st.integers(1, 4), st.integers(1, 9))
def test_every_element_of_what_moves_comes_from_one_rank(case, size, copies, bucket):
    """With weights in parts over copies, each of which has its part of each bucket: parts begin and end in experts."""
    _, after = case
    before = plain_map(sum(map(len, after)), len(after))
    local = len(before[0]) * size
    ranks, elements = [], []
    for copy in range(copies):
        own = [each for each in range(local) if each // bucket % copies == copy]
        runs = [list(run) for _, run in itertools.groupby(own, lambda each: each // bucket)]
        spans = tuple(HeldRange(run[0], run[-1] + 1, own.index(run[0])) for run in runs)
        ranks += [Elements(rank, spans) for rank in range(len(before))]
        elements += [own] * len(before)

    def held(map_of_ranks) -> list[list[int]]:
        pairs = zip(ranks, elements, strict=True)
        return [[map_of_ranks[each.ep_rank][i // size] * size + i % size for i in own] for each, own in pairs]

    sent, moved = held(before), held(before)
    for move in moves_between(before, after):
        for source, target in itertools.product(range(len(ranks)), repeat=2):
            for here, there, length in move.pieces(size, ranks[source], ranks[target]):
                moved[target][there : there + length] = sent[source][here : here + length]
    assert moved == held(after)


def test_ids_become_places_and_none_stays_none():
    mapped = MappedExperts(((3, 1), (2, 0)))
    ids = torch.tensor([[0, 3], [-1, 4], [2, 1]])
    assert mapped.slots(ids).tolist() == [[3, 0], [-1, -1], [2, 1]]
    mapped.count(ids)
    mapped.count(torch.tensor([[0, 0]]))
    assert mapped.loads(ids.device).tolist() == [3, 1, 1, 1]
    mapped.start_again(((0, 1), (2, 3)), [1, 2, 3, 4])
    mapped.count(ids)
    assert mapped.slots(ids).tolist() == [[0, 3], [-1, -1], [2, 1]]
    assert mapped.loads(ids.device).tolist() == [2, 3, 4, 5]
