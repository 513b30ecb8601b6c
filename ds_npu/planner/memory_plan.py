"""Chooses what each layer keeps of its activations, so that a step stays within a budget for the least extra time.

Pure: neither torch nor DeepSpeed. A mixed-integer linear program, solved by HiGHS (scipy.optimize.milp; Huangfu and
Hall 2018, doi 10.1007/s12532-017-0130-5): one variable of 0 or 1 for each layer and option, one of a layer's options is
taken, and at every moment of a step what is allocated must be within the budget. One such program for each pattern of
layers that are swapped beside (``swap_pattern``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ds_npu.capability import try_import
from ds_npu.planner.swap_pattern import NOTHING_SWAPPED, SwapPattern

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
    rest_bytes: int = 0
    """Of ``kept_bytes``, what stays on the device where the layer is swapped: what is small."""
    beside_bytes: int = 0
    """Of ``kept_bytes``, what the layer's own backward has beside all that it saves: what that is computed from."""


@dataclass(frozen=True)
class PlannedLayer:
    """One layer, and what can be done with it; the first option is the one that moments were measured with."""

    name: str
    options: tuple[Option, ...]
    forward_seconds: float = 0.0
    """That a forward takes."""


@dataclass(frozen=True)
class Moment:
    """An interval of a step, in which every layer had its first option."""

    what: str
    peak_bytes: int
    """The most that was allocated."""
    calls: tuple[int, ...]
    """By layer, how many of its forwards wait for their backward."""
    forward: int | None = None
    """The place of the layer whose forward was running."""
    backward: int | None = None
    """The place of the layer whose backward was running."""


@dataclass(frozen=True)
class MemoryPlan:
    """An option of each layer."""

    options: tuple[Option, ...]
    peak_bytes: int
    """The most that is allocated in any moment."""
    tightest: str
    """The moment that needs so much."""
    pattern: SwapPattern = NOTHING_SWAPPED

    @property
    def wait_seconds(self) -> float:
        """That the forward and backward of one micro-batch wait for copies."""
        return sum(_wait_seconds(self.pattern, place, each) for place, each in enumerate(self.options))

    @property
    def seconds(self) -> float:
        """That the forward and backward of one micro-batch take longer."""
        return sum(each.seconds for each in self.options) + self.wait_seconds

    def host_bytes(self, moments: Iterable[Moment]) -> int:
        """The most that waits on the host in any of ``moments``."""
        swapped = [(place, self.options[place]) for place in self.pattern.on_host]
        return max(
            sum(
                self.pattern.count_on_host(place, each.calls, each.forward) * (option.kept_bytes - option.rest_bytes)
                for place, option in swapped
            )
            for each in moments
        )


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


def measured(
    layers: Sequence[PlannedLayer],
    moments: Sequence[Moment],
    options: Sequence[Option],
    pattern: SwapPattern = NOTHING_SWAPPED,
) -> MemoryPlan:
    """The plan that takes these ``options`` and swaps ``pattern``, with what it needs."""
    columns = list(enumerate(options))
    needs = [
        (moment.peak_bytes + sum(_more_bytes(layers, columns, moment, pattern)), moment.what) for moment in moments
    ]
    peak, what = max(needs)
    return MemoryPlan(tuple(options), peak, what, pattern)


def _more_bytes(
    layers: Sequence[PlannedLayer], columns: Sequence[tuple[int, Option]], moment: Moment, pattern: SwapPattern
) -> list[int]:
    """What each option of the layer at a place needs in ``moment`` beside what was measured."""
    return [
        moment.calls[place] * (option.kept_bytes - layers[place].options[0].kept_bytes)
        - pattern.count_on_host(place, moment.calls, moment.forward) * (option.kept_bytes - option.rest_bytes)
        + (option.beside_bytes if place == moment.backward else 0)
        for place, option in columns
    ]


def _wait_seconds(pattern: SwapPattern, place: int, option: Option) -> float:
    return pattern.wait_seconds(place, option.kept_bytes - option.rest_bytes)


def best_plan(
    layers: Sequence[PlannedLayer],
    moments: Sequence[Moment],
    budget_bytes: int,
    swapped: Iterable[SwapPattern] = (),
) -> MemoryPlan:
    """The plan with the least extra time that needs at most ``budget_bytes`` in each of ``moments``.

    It swaps nothing, or one of ``swapped``. A pure function of its arguments. Raises BudgetError, with the plan that
    needs the least, where none is possible, and RuntimeError without scipy.
    """
    found: list[MemoryPlan] = []
    errors: list[BudgetError] = []
    for pattern in (NOTHING_SWAPPED, *swapped):
        try:
            found.append(_best_with(pattern, layers, moments, budget_bytes))
        except BudgetError as error:
            errors.append(error)
        if found and not found[-1].seconds:
            break
    if not found:
        raise min(errors, key=lambda error: error.least.peak_bytes)
    return min(found, key=lambda plan: plan.seconds)


def _best_with(
    pattern: SwapPattern, layers: Sequence[PlannedLayer], moments: Sequence[Moment], budget_bytes: int
) -> MemoryPlan:
    for choose in (fastest, smallest):
        plan = measured(layers, moments, [choose(layer) for layer in layers], pattern)
        if choose is fastest and plan.peak_bytes <= budget_bytes and not plan.wait_seconds:
            return plan
    if plan.peak_bytes > budget_bytes:
        raise BudgetError(budget_bytes, plan)
    problem = _Problem(layers, moments, pattern)
    for spare_bytes in (0.0, TOLERANCE * budget_bytes):
        chosen = problem.solved(budget_bytes - spare_bytes, budget_bytes)
        found = None if chosen is None else measured(layers, moments, chosen, pattern)
        if found is not None and found.peak_bytes <= budget_bytes:
            return found
    return plan


def useful(options: Sequence[Option], wait_seconds: Callable[[Option], float], is_swapped: bool) -> list[Option]:
    """``options`` without those than which another keeps no more, here and on the host, and takes no longer."""
    found: list[Option] = []
    for each in sorted(options, key=lambda option: (option.seconds + wait_seconds(option), option.kept_bytes)):
        if all(
            each.kept_bytes < other.kept_bytes
            or each.beside_bytes < other.beside_bytes
            or (is_swapped and each.rest_bytes < other.rest_bytes)
            for other in found
        ):
            found.append(each)
    return found


def fastest(layer: PlannedLayer) -> Option:
    """The option of ``layer`` that takes the least extra time."""
    return min(layer.options, key=lambda each: (each.seconds, each.kept_bytes))


def smallest(layer: PlannedLayer) -> Option:
    """The option of ``layer`` that keeps the least."""
    return min(layer.options, key=lambda each: (each.kept_bytes, each.seconds))


class _Problem:
    """The mixed-integer linear program of one pattern."""

    def __init__(self, layers: Sequence[PlannedLayer], moments: Sequence[Moment], pattern: SwapPattern) -> None:
        self._layers, self._pattern = layers, pattern
        self._columns: list[tuple[int, Option]] = []
        """By variable, the place of a layer and an option of it."""
        for place, layer in enumerate(layers):
            options = useful(layer.options, partial(_wait_seconds, pattern, place), place in pattern.on_host)
            self._columns += [(place, option) for option in options]
        # Of moments that are alike, the one that needs most.
        self._moments: dict[tuple[tuple[int, ...], int | None, int | None], Moment] = {}
        for moment in moments:
            key = moment.calls, moment.forward if pattern.places else None, moment.backward
            self._moments[key] = max(moment, self._moments.get(key, moment), key=lambda each: each.peak_bytes)

    def solved(self, room_bytes: float, unit_bytes: int) -> list[Option] | None:
        """The options that the solver takes; None where it finds none. ``unit_bytes``: makes numbers near 1, for which
        the solver's tolerances are."""
        solver, error = try_import(SOLVER)
        numpy, _ = try_import("numpy")
        if solver is None or numpy is None:
            raise RuntimeError(WITHOUT_SOLVER) from error
        columns, moments = self._columns, self._moments.values()
        one_each = numpy.zeros((len(self._layers), len(columns)))
        for column, (place, _) in enumerate(columns):
            one_each[place, column] = 1
        held = [_more_bytes(self._layers, columns, moment, self._pattern) for moment in moments]
        room = [room_bytes - moment.peak_bytes for moment in moments]
        rows, most = (numpy.array(each, dtype=float) / max(1, unit_bytes) for each in (held, room))
        seconds = numpy.array([each.seconds + _wait_seconds(self._pattern, place, each) for place, each in columns])
        found = solver.milp(
            seconds / max(seconds.max(), 1e-12),
            integrality=numpy.ones(len(columns)),
            bounds=solver.Bounds(0, 1),
            constraints=[solver.LinearConstraint(one_each, 1, 1), solver.LinearConstraint(rows, -numpy.inf, most)],
            options={"mip_rel_gap": GAP, "time_limit": SOLVER_SECONDS},
        )
        return None if found.x is None else self._taken(found.x)

    def _taken(self, values: Sequence[float]) -> list[Option]:
        taken: dict[int, tuple[float, Option]] = {}
        for (place, option), value in zip(self._columns, values, strict=True):
            if place not in taken or value > taken[place][0]:
                taken[place] = value, option
        return [taken[place][1] for place in range(len(self._layers))]
