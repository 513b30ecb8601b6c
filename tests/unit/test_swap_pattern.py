"""Plans that swap layers: what is on the device at each moment of a step, and the best of all plans."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ds_npu.planner.memory_plan import BudgetError, Moment, Option, PlannedLayer, best_plan, measured
from ds_npu.planner.memory_plan_table import StagePlan, section_of
from ds_npu.planner.swap_pattern import NOTHING_SWAPPED, SwapPattern, patterns

LAYERS = 6


def layers_of(seed: int) -> list[PlannedLayer]:
    """Layers with three options that keep less the longer they take, the first keeps the least; a part is small."""
    random = np.random.default_rng(seed)
    made = []
    for place in range(LAYERS):
        kept = [int(each) for each in np.sort(random.integers(100, 1000, 3))]
        seconds = [*(float(each) for each in np.sort(random.uniform(1e-3, 1e-2, 2))[::-1]), 0.0]
        options = tuple(
            Option((str(size),), size, taken, int(random.integers(0, 50)), index * int(random.integers(0, 90)))
            for index, (size, taken) in enumerate(zip(kept, seconds, strict=True))
        )
        made.append(PlannedLayer(f"layers.{place}", options, float(random.uniform(1e-3, 2e-3))))
    return made


def moments_of(seed: int) -> list[Moment]:
    """Each forward, what is behind it, and each backward, of one micro-batch."""
    random = np.random.default_rng(seed)
    found = []
    for place in range(LAYERS):
        for is_inside in (True, False):
            calls = (1,) * (place + 1) + (0,) * (LAYERS - place - 1)
            forward = place if is_inside else None
            found.append(Moment(f"forward {place} {is_inside}", int(5000 + random.integers(0, 900)), calls, forward))
    for place in reversed(range(LAYERS)):
        calls = (1,) * place + (0,) * (LAYERS - place)
        found.append(Moment(f"backward {place}", int(5000 + random.integers(0, 900)), calls, backward=place))
    return found


def held_in_time(
    layers: list[PlannedLayer], moments: list[Moment], options: tuple[Option, ...], places: tuple[int, ...]
) -> list[int]:
    """By moment, what is allocated: from what happens one after the other, by no formula."""
    before = {each: places[index - 1] for index, each in enumerate(places) if index}
    held, known, needs, times = [0] * LAYERS, [0] * LAYERS, [], iter(moments)

    def now(beside: int = 0) -> None:
        needs.append(next(times).peak_bytes + sum(held) - sum(known) + beside)

    for place in range(LAYERS):
        held[place], known[place] = options[place].kept_bytes, layers[place].options[0].kept_bytes
        now()
        if place in before:
            # The copy of the swapped layer before has had all this time.
            held[before[place]] = options[before[place]].rest_bytes
        now()
    for place in reversed(range(LAYERS)):
        if place in before:
            held[before[place]] = options[before[place]].kept_bytes
        held[place] = known[place] = 0
        now(options[place].backward_bytes)
    return needs


def test_several_micro_batches_over_two_stages_of_a_rank():
    """Of each call, whether it is on the host: from what happens one after the other, by no formula."""
    pattern = SwapPattern((0, 1, 2, 3, 5), (1.0,) * LAYERS, 1e9, (3,))
    assert pattern.on_host == (0, 1, 3)
    before = {1: 0, 2: 1, 5: 3}
    stages = (range(3), range(3, LAYERS))
    order = "0F 0F 1F 0F 1B 0B 1F 0F 1F 1B 0B"
    waiting: dict[int, list[int]] = {0: [], 1: []}
    on_host: dict[tuple[int, int], bool] = {}
    numbers, seen = itertools.count(), 0

    def now(forward: int | None = None) -> None:
        nonlocal seen
        calls = [sum(place == each for _, place in on_host) for each in range(LAYERS)]
        found = [pattern.count_on_host(each, calls, forward) for each in range(LAYERS)]
        assert found == [sum(away for (_, place), away in on_host.items() if place == each) for each in range(LAYERS)]
        seen = max(seen, sum(found))

    for stage, action in ((int(each[0]), each[1]) for each in order.split()):
        if action == "F":
            number = next(numbers)
            waiting[stage].append(number)
            for place in stages[stage]:
                on_host[number, place] = False
                now(forward=place)
                if place in before:
                    on_host[number, before[place]] = True
                now()
            continue
        number = waiting[stage].pop(0)
        for place in reversed(stages[stage]):
            if place in before:
                on_host[number, before[place]] = False
            del on_host[number, place]
            now()
    assert seen == 8


def every_pattern(layers: list[PlannedLayer], bandwidth: float) -> list[SwapPattern]:
    return list(patterns([each.forward_seconds for each in layers], bandwidth))


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_on_the_device_at_each_moment(seed):
    layers, moments = layers_of(seed), moments_of(seed)
    found = every_pattern(layers, 1e6)
    assert [each.layers for each in found] == [(0, 4), (0, 3), (0, 2, 4), tuple(range(6))]
    for pattern in (*found, NOTHING_SWAPPED, SwapPattern((1, 3, 5))):
        for chosen in range(3):
            options = tuple(layer.options[(chosen + place) % 3] for place, layer in enumerate(layers))
            needs = held_in_time(layers, moments, options, pattern.layers)
            assert [measured(layers, [each], options, pattern).peak_bytes for each in moments] == needs, pattern
            assert measured(layers, moments, options, pattern).peak_bytes == max(needs)


def test_each_stage_of_a_rank_has_a_layer_that_stays():
    found = list(patterns([1.0] * 7, 1e9, [4]))
    assert [each.layers for each in found] == [(0, 3), (0, 2, 4, 6), tuple(range(7))]
    assert [each.on_host for each in found] == [(0,), (0, 4), (0, 1, 2, 4, 5)]
    # A stage of one layer, whose activations are the first that its backward needs.
    assert [each.layers for each in patterns([1.0] * 3, 1e9, [2])] == [(0, 1)]


def test_waiting_for_copies():
    pattern = SwapPattern((0, 2, 3), (1.0, 2.0, 3.0, 4.0), 10.0)
    # Beside layers 1 and 2: 5 s in forward, 10 s in backward; beside layer 3: 4 s and 8 s.
    assert [pattern.wait_seconds(0, size) for size in (50, 70, 120)] == [0.0, 2.0, 9.0]
    assert [pattern.wait_seconds(2, size) for size in (40, 90)] == [0.0, 6.0]
    assert pattern.wait_seconds(1, 1000) == pattern.wait_seconds(3, 1000) == 0.0


def best_of_all(
    layers: list[PlannedLayer], moments: list[Moment], budget: int, swapped: list[SwapPattern]
) -> float | None:
    """The least extra time of every combination of options and pattern that stays within ``budget``."""
    plans = (
        measured(layers, moments, options, pattern)
        for pattern in swapped
        for options in itertools.product(*(layer.options for layer in layers))
    )
    return min((each.seconds for each in plans if each.peak_bytes <= budget), default=None)


@pytest.mark.parametrize(("seed", "bandwidth"), [(1, 2e5), (2, 1e9)])
def test_a_plan_is_the_best_of_all_patterns(seed, bandwidth):
    layers, moments = layers_of(seed), moments_of(seed)
    swapped = every_pattern(layers, bandwidth)
    least = min(measured(layers, moments, [layer.options[0] for layer in layers], each).peak_bytes for each in swapped)
    most = measured(layers, moments, [layer.options[-1] for layer in layers]).peak_bytes
    swaps = []
    for share in (0.0, 0.3, 0.7, 1.0):
        budget = int(least + share * (most - least))
        plan = best_plan(layers, moments, budget, swapped)
        best = best_of_all(layers, moments, budget, [NOTHING_SWAPPED, *swapped])
        assert plan.peak_bytes <= budget and best is not None
        assert best - 1e-12 <= plan.seconds <= 1.03 * best + 1e-12, (share, plan.seconds, best)
        swaps.append(bool(plan.pattern.layers))
    assert swaps[0] and not swaps[-1]
    with pytest.raises(BudgetError) as raised:
        best_plan(layers, moments, least - 1, swapped)
    assert raised.value.least.peak_bytes == least


def test_a_swapped_plan_as_keys():
    layers = layers_of(1)
    options = [Option((), 10, 0.0), *([Option(("norm",), 5, 0.1)] * (LAYERS - 1))]
    plan = measured(layers, moments_of(1), options, SwapPattern((0, 2, 4), (1.0,) * LAYERS, 1e9))
    assert plan.host_bytes(moments_of(1)) == 15
    assert section_of([StagePlan(0, tuple(layers), (), {}, plan)]) == {
        "recompute": {"norm": ["layers.{1..5}"]},
        "swap": {"activations": ["layers.{0,2,4}"], "depth": 1},
    }
