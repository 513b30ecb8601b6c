"""Which algorithm of context parallelism a run takes where its config leaves that open: the one estimated fastest.

Pure: neither torch nor DeepSpeed. The estimates are ``context_cost``'s, and rest on assumed speeds of a Machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.config.context_parallel import ContextParallelSection, algorithms
from ds_npu.config.problems import ConfigError, Problem
from ds_npu.planner.context_cost import Cost, Layer, cost, impossible
from ds_npu.planner.machine import A2, Machine
from ds_npu.topology.degrees import Degrees

ALIKE = 1.001
"""Times that differ by less than this factor count as equal."""


@dataclass(frozen=True)
class Candidate:
    """An algorithm and what it is estimated to cost, or why it cannot be."""

    algorithm: ContextAlgorithm
    cost: Cost | None
    impossible: str | None

    def __str__(self) -> str:
        return described(self.algorithm)


@dataclass(frozen=True)
class Choice:
    """The algorithm to take, and the candidates it was chosen from: the fastest first, then those that cannot be."""

    algorithm: ContextAlgorithm
    candidates: tuple[Candidate, ...]
    reason: str


def described(algorithm: ContextAlgorithm) -> str:
    """In words: ``hybrid (ulysses 4, window 2)``."""
    sizes = [f"ulysses {algorithm.ulysses}"] if algorithm.name == "hybrid" else []
    sizes += [f"window {algorithm.window}"] if algorithm.window > 1 else []
    return f"{algorithm.name} ({', '.join(sizes)})" if sizes else algorithm.name


def refusals(candidates: Iterable[Candidate]) -> list[str]:
    """Why which of ``candidates`` are impossible, a line for each reason."""
    names: dict[str, list[str]] = {}
    for each in candidates:
        if each.impossible:
            names.setdefault(each.impossible, []).append(str(each))
    return [f"{_few(found)}: {reason}" for reason, found in names.items()]


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def communicators(algorithm: ContextAlgorithm) -> int:
    """Process groups that a rank uses, as ``axis.context_axis`` opens them."""
    ulysses = int(algorithm.ulysses > 1)
    if algorithm.ring == 1 or algorithm.gather:
        return max(ulysses, 1)
    return ulysses + (2 if algorithm.window == 1 else 5)


def estimated(
    found: Iterable[ContextAlgorithm], layer: Layer, degrees: Degrees, machine: Machine = A2
) -> list[Candidate]:
    """What each of ``found`` costs in a layer of the model, or why it is impossible."""
    candidates = []
    for algorithm in found:
        reason = impossible(layer, algorithm, degrees)
        candidates.append(Candidate(algorithm, None if reason else cost(layer, algorithm, degrees, machine), reason))
    return candidates


def choose(candidates: Sequence[Candidate]) -> Choice | None:
    """The fastest of ``candidates``; None where all are impossible.

    Of those as fast, one that does not gather the whole sequence, then the one with fewest communicators. Every rank
    that asks the same is told the same.
    """
    timed = [(each.cost.seconds, each) for each in candidates if each.cost]
    timed.sort(key=lambda pair: (pair[0], str(pair[1])))
    if not timed:
        return None
    alike = [each for seconds, each in timed if seconds <= ALIKE * timed[0][0]]
    chosen = min(alike, key=lambda each: (each.algorithm.gather, communicators(each.algorithm)))
    reason = "the only one possible" if len(timed) == 1 else "the fastest by the estimate"
    if len(alike) > 1:
        reason = f"the simplest of {len(alike)} that are as fast"
    ordered = [each for _, each in timed] + [each for each in candidates if each.impossible]
    return Choice(chosen.algorithm, tuple(ordered), reason)


def choose_for(section: ContextParallelSection, layer: Layer, degrees: Degrees, machine: Machine = A2) -> Choice:
    """The choice that the keys of ``section`` leave for ``degrees.cp`` ranks (2 or more).

    Raises ConfigError, which names the keys, where the heads, the sequence or the keys leave none.
    """
    candidates = estimated(algorithms(section, degrees.cp), layer, degrees, machine)
    if choice := choose(candidates):
        return choice
    given = {key: value for key, value in section if key != "kv_cache" and value is not None}
    path = ", ".join(["ds_npu.parallel.context", *(f"ds_npu.context_parallel.{key}" for key in given)])
    found = [degrees.cp, *given.values()] if given else degrees.cp
    reasons = "; ".join(refusals(candidates)) or "these keys contradict each other"
    raise ConfigError([Problem(path, found, f"sizes that leave an algorithm to this model and sequence ({reasons})")])
