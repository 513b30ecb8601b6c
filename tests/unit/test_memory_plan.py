"""Plans for a budget of memory against every plan that there is, and as keys of the section."""

from __future__ import annotations

import itertools
import pickle
from unittest import mock

import numpy as np
import pytest

from ds_npu.config.rules import broken_rules
from ds_npu.config.sections import DsNpuConfig
from ds_npu.models import names
from ds_npu.planner import memory_plan
from ds_npu.planner.memory_plan import (
    BudgetError,
    MemoryPlan,
    Moment,
    Option,
    PlannedLayer,
    best_plan,
    fastest,
    measured,
    smallest,
)
from ds_npu.planner.memory_plan_table import ACTIVATION, ATTENTION, MLP, NORM, WHOLE, StagePlan, globs, section_of

LAYERS = 12
WITHIN = 1.03


def layers_of(seed: int, options: int) -> list[PlannedLayer]:
    """Layers whose options keep less the longer they take, of numbers that are not alike; the first keeps the least."""
    random = np.random.default_rng(seed)
    made = []
    for place in range(LAYERS):
        kept = np.sort(random.integers(10, 1000, options))
        seconds = np.sort(random.uniform(1e-4, 1e-2, options - 1))[::-1]
        pairs = zip(kept, [*seconds, 0.0], strict=True)
        made.append(
            PlannedLayer(f"layers.{place}", tuple(Option((str(each),), int(each[0]), float(each[1])) for each in pairs))
        )
    return made


def moments_of(seed: int) -> list[Moment]:
    """Forwards that wait, one more at each moment, as before a backward; and two micro-batches in flight."""
    random = np.random.default_rng(seed)
    found = [
        Moment(f"moment {count}", int(20_000 + random.integers(0, 400)), (1,) * count + (0,) * (LAYERS - count))
        for count in range(LAYERS + 1)
    ]
    return [*found, Moment("two in flight", 19_000, (2,) * 3 + (1,) * (LAYERS - 3))]


def best_of_all(layers: list[PlannedLayer], moments: list[Moment], budget: int) -> float | None:
    """The least extra time of every combination of options that stays within ``budget``."""
    counts = [len(layer.options) for layer in layers]
    choices = np.array(list(itertools.product(*map(range, counts))), dtype=np.int8)
    more = np.zeros(choices.shape)
    seconds = np.zeros(len(choices))
    for place, layer in enumerate(layers):
        kept = np.array([option.kept_bytes - layer.options[0].kept_bytes for option in layer.options])
        more[:, place] = kept[choices[:, place]]
        seconds += np.array([option.seconds for option in layer.options])[choices[:, place]]
    fits = np.ones(len(choices), dtype=bool)
    for moment in moments:
        fits &= moment.peak_bytes + more @ np.array(moment.calls) <= budget
    return float(seconds[fits].min()) if fits.any() else None


@pytest.mark.parametrize("seed", [1, 2])
def test_a_plan_is_the_best_of_all(seed):
    layers, moments = layers_of(seed, 3), moments_of(seed)
    low = measured(layers, moments, list(map(smallest, layers))).peak_bytes
    high = measured(layers, moments, list(map(fastest, layers))).peak_bytes
    for share in (0.0, 0.1, 0.4, 0.8, 1.0):
        budget = int(low + share * (high - low))
        plan = best_plan(layers, moments, budget)
        assert plan.peak_bytes <= budget
        best = best_of_all(layers, moments, budget)
        assert best is not None and best - 1e-12 <= plan.seconds <= WITHIN * best, (share, plan.seconds, best)
    assert best_of_all(layers, moments, low - 1) is None


def test_an_impossible_budget_says_what_is_needed():
    layers, moments = layers_of(3, 3), moments_of(3)
    with pytest.raises(BudgetError) as raised:
        best_plan(layers, moments, 1000)
    needed = raised.value.least.peak_bytes
    assert best_plan(layers, moments, needed).peak_bytes == needed
    with pytest.raises(BudgetError):
        best_plan(layers, moments, needed - 1)
    # Ranks tell each other.
    assert pickle.loads(pickle.dumps(raised.value)).least == raised.value.least


def test_without_its_solver_the_error_names_the_extra():
    layers, moments = layers_of(1, 3), moments_of(1)
    with mock.patch.object(memory_plan, "try_import", lambda name: (None, ImportError(name))):
        assert memory_plan.missing_solver() == [memory_plan.WITHOUT_SOLVER]
        budget = measured(layers, moments, list(map(smallest, layers))).peak_bytes + 1000
        with pytest.raises(RuntimeError, match=r"ds_npu\[planner\]"):
            best_plan(layers, moments, budget)
    assert memory_plan.missing_solver() == []


def test_a_plan_as_keys():
    every = [(WHOLE,), (ATTENTION, NORM), (ATTENTION, NORM), (MLP,), (ACTIVATION, NORM), ()]
    layers = tuple(PlannedLayer(f"model.layers.{place}", (Option(parts, 1, 1.0),)) for place, parts in enumerate(every))
    modules = {each.name: {ATTENTION: [f"{each.name}.self_attn"], MLP: [f"{each.name}.mlp"]} for each in layers}
    plan = MemoryPlan(tuple(each.options[0] for each in layers), 1, "a moment")
    assert section_of([StagePlan(0, layers, (), modules, plan)]) == {
        "recompute": {
            "activation_function": ["model.layers.4"],
            "modules": ["model.layers.0", "model.layers.{1..2}.self_attn", "model.layers.3.mlp"],
            "norm": ["model.layers.{1..2,4}"],
        }
    }
    assert section_of([StagePlan(0, (), (), {}, MemoryPlan((), 1, ""))]) == {}


def test_globs_match_what_they_are_made_of():
    of_model = [f"h.{place}.{name}" for place in range(12) for name in ("mlp", "attn")]
    chosen = [of_model[place] for place in (0, 3, 4, 5, 8, 10, 23)]
    found = [each for each in of_model if any(names.matches(glob, each) for glob in globs(chosen))]
    assert found == chosen
    assert names.matches("a.{0..2,7}.b", "a.7.b") and not names.matches("a.{0..2,7}.b", "a.3.b")
    assert not names.matches("a.{0..2}", "a.b") and names.matches("{x}", "{x}")


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"recompute": {"budget_gib": 1, "norm": ["**.0"]}}, "recompute.norm"),
        ({"recompute": {"budget_gib": 1, "layers": "all"}}, "recompute.layers"),
        ({"recompute": {"budget_gib": 1, "keep": ["matmul"]}}, "recompute.keep"),
        ({"recompute": {"budget_gib": 1}, "swap": {"activations": True}}, "swap.activations"),
        ({"recompute": {"budget_gib": 1}, "moe": {"zero_memory": "level1"}}, "moe.zero_memory"),
        (
            {"recompute": {"budget_gib": 1}, "parallel": {"pipeline": 2}, "pipeline": {"recompute": "bubble"}},
            "pipeline.recompute",
        ),
    ],
    ids=str,
)
def test_what_a_plan_decides_is_refused_beside_it(more, path):
    (problem,) = broken_rules(DsNpuConfig.model_validate(more), frozenset())
    assert problem.path == f"ds_npu.{path}" and "nothing beside ds_npu.recompute.budget_gib" in problem.accepted
    assert [*broken_rules(DsNpuConfig.model_validate({"recompute": {"budget_gib": 1}}), frozenset())] == []
