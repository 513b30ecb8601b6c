"""Chooses the algorithm of context parallelism where the config leaves it open: the fastest by estimate.

Pure: neither torch nor DeepSpeed. ``context_cost`` makes the estimates, from assumed speeds of a Machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.config.context_parallel import ContextParallelSection, algorithms
from ds_npu.config.problems import ConfigError, Problem
from ds_npu.planner.context_cost import Layer, LayerCost, impossible, layer_cost
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.machine import A2, Machine

EQUAL_FACTOR = 1.001


@dataclass(frozen=True)
class Candidate:
    """An algorithm with its estimated cost, or why it is impossible."""

    algorithm: ContextAlgorithm
    cost: LayerCost | None
    impossible: str | None

    def __str__(self) -> str:
        return algorithm_text(self.algorithm)


@dataclass(frozen=True)
class Choice:
    """The chosen algorithm, and the candidates: the fastest first, then the impossible ones."""

    algorithm: ContextAlgorithm
    candidates: tuple[Candidate, ...]
    reason: str


def algorithm_text(algorithm: ContextAlgorithm) -> str:
    """``algorithm`` as texts name it: ``hybrid (ulysses 4, window 2)``."""
    sizes = [f"ulysses {algorithm.ulysses}"] if algorithm.name == "hybrid" else []
    sizes += [f"window {algorithm.window}"] if algorithm.window > 1 else []
    return f"{algorithm.name} ({', '.join(sizes)})" if sizes else algorithm.name


def refusals(candidates: Iterable[Candidate]) -> list[str]:
    """A line for each reason why some of ``candidates`` are impossible."""
    names: dict[str, list[str]] = {}
    for each in candidates:
        if each.impossible:
            names.setdefault(each.impossible, []).append(str(each))
    return [
        ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "") + f": {reason}"
        for reason, found in names.items()
    ]


def communicators(algorithm: ContextAlgorithm) -> int:
    """The number of communicators that ``axis.context_axis`` opens on a rank."""
    ulysses = int(algorithm.ulysses > 1)
    if algorithm.ring == 1 or algorithm.gather:
        return max(ulysses, 1)
    return ulysses + (2 if algorithm.window == 1 else 5)


def estimated(
    found: Iterable[ContextAlgorithm], layer: Layer, degrees: Degrees, machine: Machine = A2
) -> list[Candidate]:
    """For each of ``found``, its cost in a layer of the model, or why it is impossible."""
    reasons = ((algorithm, impossible(layer, algorithm, degrees)) for algorithm in found)
    return [
        Candidate(algorithm, None if reason else layer_cost(layer, algorithm, degrees, machine), reason)
        for algorithm, reason in reasons
    ]


def choose(candidates: Sequence[Candidate]) -> Choice | None:
    """The fastest of ``candidates``; None where all are impossible.

    Among equally fast ones it prefers one that does not gather the whole sequence, then the one with the fewest
    communicators. A pure function: all ranks choose alike.
    """
    timed = [(each.cost.seconds, each) for each in candidates if each.cost]
    timed.sort(key=lambda pair: (pair[0], str(pair[1])))
    if not timed:
        return None
    alike = [each for seconds, each in timed if seconds <= EQUAL_FACTOR * timed[0][0]]
    chosen = min(alike, key=lambda each: (each.algorithm.gather, communicators(each.algorithm)))
    reason = "the only one possible" if len(timed) == 1 else "the fastest by the estimate"
    if len(alike) > 1:
        reason = f"the simplest of {len(alike)} that are as fast"
    ordered = [each for _, each in timed] + [each for each in candidates if each.impossible]
    return Choice(chosen.algorithm, tuple(ordered), reason)


def choose_for(section: ContextParallelSection, layer: Layer, degrees: Degrees, machine: Machine = A2) -> Choice:
    """Choose among the algorithms that the keys of ``section`` leave for ``degrees.cp`` (2 or more) ranks.

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
