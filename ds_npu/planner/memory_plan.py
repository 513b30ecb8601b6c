"""Chooses which activations each layer keeps, so that a step fits a budget at the least extra time.

Pure: neither torch nor DeepSpeed. A mixed-integer linear program, solved by HiGHS (scipy.optimize.milp; Huangfu and
Hall 2018, doi 10.1007/s12532-017-0130-5), has a variable of 0 or 1 for each layer and option; one of a layer's options
is taken, and at every moment of a step the allocated bytes must be within the budget. There is one such program for
each pattern of swapped layers (``swap_pattern``).
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
"""Part of the extra time by which the solver's plan may be worse than the best one."""
SOLVER_SECONDS = 60.0
TOLERANCE = 2e-6
"""Part of the budget; the solver may exceed the budget by half of it."""


@dataclass(frozen=True)
class Option:
    """A way to keep less of one layer's activations."""

    parts: tuple[str, ...]
    """Parts that are computed again; none: all is kept."""
    kept_bytes: int
    """Bytes kept from a forward of the layer to its backward."""
    seconds: float
    """Additional seconds of a forward and backward."""
    rest_bytes: int = 0
    """Part of ``kept_bytes`` that remains on the device where the layer is swapped: small storages."""
    backward_bytes: int = 0
    """Part of ``kept_bytes`` that the layer's own backward needs once more: sources of what it computes again."""


@dataclass(frozen=True)
class PlannedLayer:
    """One layer and its options; moments were measured with the first option."""

    name: str
    options: tuple[Option, ...]
    forward_seconds: float = 0.0


@dataclass(frozen=True)
class Moment:
    """An interval of a step, in which every layer had its first option, and the layers whose passes were running."""

    what: str
    peak_bytes: int
    calls: tuple[int, ...]
    """The number of forwards of each layer that wait for their backward."""
    forward: int | None = None
    backward: int | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """The chosen option of each layer."""

    options: tuple[Option, ...]
    peak_bytes: int
    tightest: str
    """The moment with this peak."""
    pattern: SwapPattern = NOTHING_SWAPPED

    @property
    def wait_seconds(self) -> float:
        """Seconds that the forward and backward of one micro-batch wait for copies."""
        return sum(_wait_seconds(self.pattern, index, each) for index, each in enumerate(self.options))

    @property
    def seconds(self) -> float:
        """Additional seconds of the forward and backward of one micro-batch."""
        return sum(each.seconds for each in self.options) + self.wait_seconds

    def host_bytes(self, moments: Iterable[Moment]) -> int:
        """The most bytes that wait on the host in any of ``moments``."""
        swapped = [(index, self.options[index]) for index in self.pattern.on_host]
        return max(
            sum(
                self.pattern.count_on_host(index, each.calls, each.forward) * (option.kept_bytes - option.rest_bytes)
                for index, option in swapped
            )
            for each in moments
        )


class BudgetError(ValueError):
    """A budget that no plan keeps."""

    def __init__(self, budget_bytes: int, least: MemoryPlan) -> None:
        self.budget_bytes, self.least = budget_bytes, least
        super().__init__(budget_bytes, least)

    def __str__(self) -> str:
        return (
            f"no plan needs less than {self.least.peak_bytes:,} bytes (in {self.least.tightest}); "
            f"found {self.budget_bytes:,}"
        )


def missing_solver() -> list[str]:
    """Why this machine can make no plan; empty where it can."""
    return [WITHOUT_SOLVER] if try_import(SOLVER)[0] is None else []


def measured(
    layers: Sequence[PlannedLayer],
    moments: Sequence[Moment],
    options: Sequence[Option],
    pattern: SwapPattern = NOTHING_SWAPPED,
) -> MemoryPlan:
    """The plan that takes these ``options`` and swaps ``pattern``, with its peak."""
    columns = list(enumerate(options))
    peak, what = max(
        [(moment.peak_bytes + sum(_more_bytes(layers, columns, moment, pattern)), moment.what) for moment in moments]
    )
    return MemoryPlan(tuple(options), peak, what, pattern)


def _more_bytes(
    layers: Sequence[PlannedLayer], columns: Sequence[tuple[int, Option]], moment: Moment, pattern: SwapPattern
) -> list[int]:
    """Bytes that each (layer, option) of ``columns`` needs in ``moment`` beyond the measured ones."""
    return [
        moment.calls[index] * (option.kept_bytes - layers[index].options[0].kept_bytes)
        - pattern.count_on_host(index, moment.calls, moment.forward) * (option.kept_bytes - option.rest_bytes)
        + (option.backward_bytes if index == moment.backward else 0)
        for index, option in columns
    ]


def _wait_seconds(pattern: SwapPattern, index: int, option: Option) -> float:
    return pattern.wait_seconds(index, option.kept_bytes - option.rest_bytes)


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
    """Drop each option for which another keeps no more, here and on the host, and takes no longer."""
    found: list[Option] = []
    for each in sorted(options, key=lambda option: (option.seconds + wait_seconds(option), option.kept_bytes)):
        if all(
            each.kept_bytes < other.kept_bytes
            or each.backward_bytes < other.backward_bytes
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
        """The index of a layer and an option of it, for each variable."""
        for index, layer in enumerate(layers):
            options = useful(layer.options, partial(_wait_seconds, pattern, index), index in pattern.on_host)
            self._columns += [(index, option) for option in options]
        # The largest of moments that are alike.
        self._moments: dict[tuple[tuple[int, ...], int | None, int | None], Moment] = {}
        for moment in moments:
            key = moment.calls, moment.forward if pattern.layers else None, moment.backward
            self._moments[key] = max(moment, self._moments.get(key, moment), key=lambda each: each.peak_bytes)

    def solved(self, limit_bytes: float, unit_bytes: int) -> list[Option] | None:
        """Return the options that the solver takes; None where it finds none. Division by ``unit_bytes`` brings numbers
        near 1, for which the solver's tolerances are."""
        solver, error = try_import(SOLVER)
        numpy, _ = try_import("numpy")
        if solver is None or numpy is None:
            raise RuntimeError(WITHOUT_SOLVER) from error
        columns = self._columns
        moments = self._moments.values()
        one_each = numpy.zeros((len(self._layers), len(columns)))
        for column, (index, _) in enumerate(columns):
            one_each[index, column] = 1
        held = [_more_bytes(self._layers, columns, moment, self._pattern) for moment in moments]
        free = [limit_bytes - moment.peak_bytes for moment in moments]
        rows, most = (numpy.array(each, dtype=float) / max(1, unit_bytes) for each in (held, free))
        seconds = numpy.array([each.seconds + _wait_seconds(self._pattern, index, each) for index, each in columns])
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
        for (index, option), value in zip(self._columns, values, strict=True):
            if index not in taken or value > taken[index][0]:
                taken[index] = value, option
        return [taken[index][1] for index in range(len(self._layers))]
