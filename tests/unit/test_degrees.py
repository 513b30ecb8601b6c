"""The arithmetic of the grid, against a reference written as nested loops."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_npu.config.parallel import ParallelSection, fit
from ds_npu.topology.degrees import AXES, DENSE, EXPERT, Degrees

SIZE = st.sampled_from([1, 2, 3, 4])


@st.composite
def degrees(draw):
    dp, cp, tp = draw(SIZE), draw(SIZE), draw(SIZE)
    stage = dp * cp * tp
    ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    etp = draw(st.sampled_from([n for n in range(1, stage // ep + 1) if stage // ep % n == 0]))
    return Degrees(pp=draw(st.sampled_from([1, 2, 3])), dp=dp, cp=cp, tp=tp, ep=ep, etp=etp)


def reference_grid(sizes):
    """Coordinates -> global rank, counting up with the last axis fastest."""
    return {place: rank for rank, place in enumerate(itertools.product(*map(range, sizes)))}


@given(degrees())
def test_both_views_fill_the_same_world(degrees):
    assert degrees.edp * degrees.ep * degrees.etp == degrees.dp * degrees.cp * degrees.tp
    assert degrees.world_size == degrees.pp * degrees.edp * degrees.ep * degrees.etp


@given(degrees())
def test_places_are_those_of_the_reference_grid(degrees):
    for view in (DENSE, EXPERT):
        for place, rank in reference_grid([degrees.size(axis) for axis in view]).items():
            assert tuple(degrees.coordinates(rank)[axis] for axis in view) == place


@given(degrees(), st.data())
def test_groups_partition_the_world_and_differ_along_their_axes_only(degrees, data):
    view = data.draw(st.sampled_from([DENSE, EXPERT]))
    axes = data.draw(st.lists(st.sampled_from(view), min_size=1, unique=True))
    fixed = [view.index(axis) for axis in view if axis not in axes]
    expected = {}
    for place, rank in reference_grid([degrees.size(axis) for axis in view]).items():
        expected.setdefault(tuple(place[index] for index in fixed), []).append(rank)
    groups = degrees.groups(*axes)
    assert groups == list(expected.values())
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(degrees.world_size))


@given(degrees(), st.data())
def test_a_box_says_which_ranks_a_group_has(degrees, data):
    boxes = {}
    for view in (DENSE, EXPERT):
        axes = data.draw(st.lists(st.sampled_from(view), unique=True, min_size=1))
        box, groups = degrees.box(*axes), degrees.groups(*axes)
        for group in groups:
            places = itertools.product(*(range(0, stride * size, stride) for stride, size in box))
            assert group == sorted(group[0] + sum(place) for place in places)
        boxes[box] = groups
    assert len(boxes) == len({str(groups) for groups in boxes.values()}), "equal boxes, and only they, are equal groups"


@given(degrees())
def test_fit_finds_the_data_parallel_size(degrees):
    section = ParallelSection(
        tensor=degrees.tp, context=degrees.cp, pipeline=degrees.pp, expert=degrees.ep, expert_tensor=degrees.etp
    )
    assert fit(section, degrees.world_size) == (degrees, [])
    smallest, problems = fit(section, None)
    assert not problems and degrees.world_size % smallest.world_size == 0


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="ep \\* etp = 3 \\* 1 does not divide dp \\* cp \\* tp = 2 \\* 1 \\* 2"):
        Degrees(dp=2, tp=2, ep=3)


def test_axes_of_two_views_have_no_groups():
    with pytest.raises(ValueError, match="no view of the grid holds all of"):
        Degrees(dp=2).groups("dp", "ep")
    assert set(AXES) == {*DENSE, *EXPERT}
