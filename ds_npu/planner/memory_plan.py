"""Chooses what each layer keeps of its activations, so that a step stays within a budget for the least extra time.

Pure: neither torch nor DeepSpeed. A mixed-integer linear program, solved by HiGHS (scipy.optimize.milp; Huangfu and
Hall 2018, doi 10.1007/s12532-017-0130-5): one variable of 0 or 1 for each layer and option, one of a layer's options is
taken, and at every moment of a step what is allocated must be within the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_npu.capability import try_import

SOLVER = "scipy.optimize"
WITHOUT_SOLVER = "scipy is not installed, whose solver makes the plan: pip install 'ds_npu[planner]'"
GAP = 1e-3
"""Of the extra time, by which the solver's plan may be worse than the best one."""
SOLVER_SECONDS = 60.0
TOLERANCE = 2e-6
"""Of the budget: the solver may be over by half of it."""


@dataclass(frozen=True)
class Option:
    """A way to keep less of one layer's activations."""

    parts: tuple[str, ...]
    """What is computed again; nothing: all is kept."""
    kept_bytes: int
    """From a forward of the layer to its backward."""
    seconds: float
    """That a forward and backward take longer."""


@dataclass(frozen=True)
class PlannedLayer:
    """One layer, and what can be done with it; the first option is the one that moments were measured with."""

    name: str
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Moment:
    """An interval of a step, in which every layer had its first option."""

    what: str
    peak_bytes: int
    """The most that was allocated."""
    calls: tuple[int, ...]
    """By layer, how many of its forwards wait for their backward."""


@dataclass(frozen=True)
class MemoryPlan:
    """An option of each layer."""

    options: tuple[Option, ...]
    peak_bytes: int
    """The most that is allocated in any moment."""
    tightest: str
    """The moment that needs so much."""

    @property
    def seconds(self) -> float:
        """That the forwards and backwards of one micro-batch take longer."""
        return sum(each.seconds for each in self.options)


class BudgetError(ValueError):
    """A budget that no plan keeps."""

    def __init__(self, budget_bytes: int, least: MemoryPlan) -> None:
        self.budget_bytes, self.least = budget_bytes, least
        super().__init__(budget_bytes, least)

    def __str__(self) -> str:
        least, budget_bytes = self.least, self.budget_bytes
        return f"no plan needs less than {least.peak_bytes:,} bytes (in {least.tightest}); found {budget_bytes:,}"


def missing_solver() -> list[str]:
    """Why this machine can make no plan; empty where it can."""
    return [WITHOUT_SOLVER] if try_import(SOLVER)[0] is None else []


def measured(layers: Sequence[PlannedLayer], moments: Sequence[Moment], options: Sequence[Option]) -> MemoryPlan:
    """The plan that takes these ``options``, with what it needs."""
    more = [option.kept_bytes - layer.options[0].kept_bytes for layer, option in zip(layers, options, strict=True)]
    needs = [
        (moment.peak_bytes + sum(count * each for count, each in zip(moment.calls, more, strict=True)), moment.what)
        for moment in moments
    ]
    peak, what = max(needs)
    return MemoryPlan(tuple(options), peak, what)


def best_plan(layers: Sequence[PlannedLayer], moments: Sequence[Moment], budget_bytes: int) -> MemoryPlan:
    """The plan with the least extra time that needs at most ``budget_bytes`` in each of ``moments``.

    A pure function of its arguments. Raises BudgetError, with the plan that needs the least, where none is possible,
    and RuntimeError without scipy.
    """
    for choose in (fastest, smallest):
        plan = measured(layers, moments, [choose(layer) for layer in layers])
        if choose is fastest and plan.peak_bytes <= budget_bytes:
            return plan
    if plan.peak_bytes > budget_bytes:
        raise BudgetError(budget_bytes, plan)
    tables = [useful(layer.options) for layer in layers]
    for spare_bytes in (0.0, TOLERANCE * budget_bytes):
        chosen = _solved(layers, tables, _held(layers, tables, moments, budget_bytes - spare_bytes), budget_bytes)
        found = None if chosen is None else measured(layers, moments, chosen)
        if found is not None and found.peak_bytes <= budget_bytes:
            return found
    return plan


def useful(options: Sequence[Option]) -> list[Option]:
    """``options`` without those than which another keeps no more and takes no longer, the fastest first."""
    found: list[Option] = []
    for each in sorted(options, key=lambda option: (option.seconds, option.kept_bytes)):
        if not found or each.kept_bytes < found[-1].kept_bytes:
            found.append(each)
    return found


def fastest(layer: PlannedLayer) -> Option:
    """The option of ``layer`` that takes the least extra time."""
    return min(layer.options, key=lambda each: (each.seconds, each.kept_bytes))


def smallest(layer: PlannedLayer) -> Option:
    """The option of ``layer`` that keeps the least."""
    return min(layer.options, key=lambda each: (each.kept_bytes, each.seconds))


Rows = tuple[list[list[int]], list[float]]
"""By moment and variable, bytes beside those that were measured; by moment, how many there may be."""


def _held(
    layers: Sequence[PlannedLayer], tables: Sequence[Sequence[Option]], moments: Sequence[Moment], budget_bytes: float
) -> Rows:
    room: dict[tuple[int, ...], float] = {}
    for moment in moments:
        left = budget_bytes - moment.peak_bytes
        room[moment.calls] = min(left, room.get(moment.calls, left))
    more = [
        (place, option.kept_bytes - layers[place].options[0].kept_bytes)
        for place, table in enumerate(tables)
        for option in table
    ]
    return [[calls[place] * each for place, each in more] for calls in room], list(room.values())


def _solved(
    layers: Sequence[PlannedLayer], tables: Sequence[Sequence[Option]], rows: Rows, unit_bytes: int
) -> list[Option] | None:
    """The options that the solver takes; None where it finds none. ``unit_bytes``: makes numbers near 1, for which
    the solver's tolerances are."""
    solver, error = try_import(SOLVER)
    numpy, _ = try_import("numpy")
    if solver is None or numpy is None:
        raise RuntimeError(WITHOUT_SOLVER) from error
    flat = [(place, option) for place, table in enumerate(tables) for option in table]
    seconds = numpy.array([option.seconds for _, option in flat])
    one_each = numpy.zeros((len(layers), len(flat)))
    for column, (place, _) in enumerate(flat):
        one_each[place, column] = 1
    held, room = (numpy.array(each, dtype=float) / max(1, unit_bytes) for each in rows)
    found = solver.milp(
        seconds / max(seconds.max(), 1e-12),
        integrality=numpy.ones(len(flat)),
        bounds=solver.Bounds(0, 1),
        constraints=[solver.LinearConstraint(one_each, 1, 1), solver.LinearConstraint(held, -numpy.inf, room)],
        options={"mip_rel_gap": GAP, "time_limit": SOLVER_SECONDS},
    )
    if found.x is None:
        return None
    taken: dict[int, tuple[float, Option]] = {}
    for (place, option), value in zip(flat, found.x, strict=True):
        if place not in taken or value > taken[place][0]:
            taken[place] = value, option
    return [taken[place][1] for place in range(len(layers))]
