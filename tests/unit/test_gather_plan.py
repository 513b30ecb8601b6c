"""Plans of gathers, followed as a rank follows them: what is gathered at each position, and how much."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_npu.zero_ext.gather_plan import AHEAD, Limits, Use, message_elements, plan_gathers


@st.composite
def recorded(draw):
    """Uses as they are recorded: in each position some weights are fetched, and used for some positions."""
    weights = draw(st.integers(1, 12))
    ends: dict[int, int] = {}
    uses, positions = [], draw(st.integers(1, 25))
    for position in range(positions):
        for weight in sorted(draw(st.sets(st.integers(0, weights - 1), max_size=3))):
            if ends.get(weight, -1) < position:
                last = draw(st.integers(position, min(position + 3, positions - 1)))
                uses.append(Use(weight, position, last))
                ends[weight] = last
    return uses, draw(st.lists(st.integers(1, 9), min_size=weights, max_size=weights))


def forward_and_backward(layers: int) -> list[Use]:
    order = [*range(layers), *reversed(range(layers))]
    return [Use(layer, position, position) for position, layer in enumerate(order)]


LIMITS = st.builds(Limits, st.integers(1, 30), st.integers(1, 60), st.integers(0, 60))


@given(recorded(), LIMITS, st.sets(st.integers(0, 11)))
@example((forward_and_backward(8), [3] * 8), Limits(3, 60, 0), set())
@example((forward_and_backward(8), [3] * 8), Limits(6, 60, 7), {0, 1})
@example(([Use(0, 0, 0), Use(3, 0, 0), Use(1, 2, 2), Use(2, 2, 2)], [1] * 4), Limits(3, 3, 0), set())
@example(
    ([*(Use(w, 8, 8) for w in (0, 1)), *(Use(w, 10, 10) for w in (2, 3, 4))], [1, 1, 3, 1, 1]), Limits(1, 4, 0), set()
)
def test_weights_are_there_when_they_are_used(found, limits, kept):
    uses, sizes = found
    kept &= set(range(len(sizes)))
    plan = plan_gathers(uses, dict(enumerate(sizes)), limits, kept)
    by_position = plan.sent_behind()
    positions = max((use.last for use in uses), default=-1) + 1
    there: set[int] = set()
    for micro_batch in range(3):
        assert there <= plan.carried
        in_flight = 0
        for position in range(-1, positions):
            assert {use.weight for use in uses if use.first == position} <= there
            in_flight -= sum(message.needed == position for message in plan.messages)
            for message in by_position.get(position, ()):
                sent = [weight for weight in message.weights if weight not in there]
                # What is carried is gathered by the first micro-batch alone.
                assert set(message.weights) - set(sent) <= (plan.carried if micro_batch else set())
                assert sum(sizes[weight] for weight in message.weights) <= limits.message or len(message.weights) == 1
                there.update(sent)
                in_flight += 1
                is_ahead = message.sent < message.needed - 1
                assert not is_ahead or sum(sizes[weight] for weight in there - kept) <= limits.gathered
            # Messages of weights that one module needs are sent one behind the other.
            alone = len({message.needed for message in plan.messages}) == len(plan.messages)
            assert not alone or in_flight <= AHEAD
            for use in uses:
                if use.last == position and not plan.keeps(use.weight, position + 1):
                    there.discard(use.weight)
    assert kept & {use.weight for use in uses} <= there


@given(recorded(), LIMITS)
def test_a_weight_stays_where_little_is_fetched_before_it_is_used_again(found, limits):
    uses, sizes = found
    plan = plan_gathers(uses, dict(enumerate(sizes)), limits)
    for weight in {use.weight for use in uses}:
        mine = [use for use in uses if use.weight == weight]
        for before, behind in pairwise(mine):
            between = sum(sizes[use.weight] for use in uses if before.last < use.first < behind.first)
            assert plan.keeps(weight, before.last + 1) or between >= limits.reuse
        around = [use for use in uses if use.first > mine[-1].last or use.first < mine[0].first]
        assert (weight in plan.carried) == (sum(sizes[use.weight] for use in around) < limits.reuse)


def test_each_message_is_sent_when_the_second_before_it_is_used():
    plan = plan_gathers(forward_and_backward(6), dict.fromkeys(range(6), 10), Limits(10, 1000, 0))
    found = [(message.sent, message.needed, message.weights) for message in plan.messages]
    # The layers that the backward begins with are still there.
    assert found == [
        (-1, 0, (0,)),
        (-1, 1, (1,)),
        (0, 2, (2,)),
        (1, 3, (3,)),
        (2, 4, (4,)),
        (3, 5, (5,)),
        (4, 9, (2,)),
        (5, 10, (1,)),
        (9, 11, (0,)),
    ]


def test_a_message_waits_until_weights_before_it_are_released():
    plan = plan_gathers(forward_and_backward(6), dict.fromkeys(range(6), 10), Limits(10, 20, 0))
    assert [message.sent for message in plan.messages][:6] == [-1, -1, 1, 2, 3, 4]
    # Layers 3 to 5 stay for the backward: 30 elements, and the message waits until one is left.
    assert plan.messages[6] == (8, 9, (2,))


@pytest.mark.parametrize(
    ("model", "expected"), [(10**6, 20_000_000), (6_738_000_000, 210_562_500), (10**12, 250_000_000)]
)
def test_a_message_is_about_a_layer(model, expected):
    assert message_elements(model) == expected
