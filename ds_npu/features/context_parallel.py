"""``ds_npu.context_parallel``: how the ranks that share a sequence compute attention over it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

from ds_npu.config import ConfigError, Problem, Section
from ds_npu.features.context_choice import Choice, choose, described, estimated, refusals
from ds_npu.features.context_cost import Layer
from ds_npu.features.feature import Build, ContextRanks, Feature
from ds_npu.log import logger, warn_once
from ds_npu.topology.context import AlgorithmName, ContextAlgorithm, KvCache, algorithm_of
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.machine import A2, Machine


class ContextParallelSection(Section):
    """How attention runs over a sequence split along ``parallel.context``."""

    algorithm: AlgorithmName | None = None
    """Exchange heads (ulysses), pass keys and values around (ring), both (hybrid), or gather them; left out: chosen."""
    ulysses: ContextRanks | None = None
    """Ranks of the Ulysses groups inside the context axis; the ring has context / ulysses ranks. Left out: chosen."""
    window: ContextRanks | None = None
    """Ranks of the inner ring where the ring is a ring of rings; 1 is a single ring. Left out: chosen."""
    kv_cache: KvCache | None = None
    """Received keys and values that backward keeps: none, the keys (half), both (full); left out: those of Ulysses."""


ALGORITHM, ULYSSES, WINDOW = (f"ds_npu.context_parallel.{key}" for key in ("algorithm", "ulysses", "window"))

WHOLE = (
    "ds_npu.parallel.context is {size}, and {model} holds no model of transformers: its sequences are not divided. "
    "Give each context rank other tokens, compute attention by context_attention (ds_npu.parallel.context.attention), "
    "and return each rank's share of the loss; shares are added up"
)


def _apply(section: ContextParallelSection, build: Build) -> None:
    if not build.spreads_sequences:
        return
    models = importlib.import_module("ds_npu.models.context_parallel")
    if models.is_spread(build.model):
        return
    topology = build.topology
    if not models.outermost(build.model):
        warn_once(WHOLE.format(size=topology.size("cp"), model=type(build.model).__name__))
        return
    models.spreadable(build.model, build.sketch)
    algorithm = _algorithm(section, build)
    # What scripts draw (the order of samples) must agree over ranks that share samples.
    importlib.import_module("ds_npu.parallel.tensor.randomness").align_generators(topology, build.device_type, "cp")
    models.spread_sequence(build.model, build.sketch, topology, algorithm, build.device_type)


def _algorithm(section: ContextParallelSection, build: Build) -> Any:
    """The one that ``section`` leaves, or what chooses it for the first batch: (samples, length) -> algorithm.

    Raises ConfigError where no algorithm is for so many heads.
    """
    degrees, plan = build.topology.degrees, build.sketch
    # The one with fewest heads limits a Ulysses exchange most.
    shape = min(plan.attentions.values(), key=lambda each: each.heads, default=None)
    found = algorithms(section, degrees.cp)
    if shape is None:
        if len(found) == 1:
            return found[0]
        names = ", ".join(sorted({each.name for each in found}))
        accepted = f"keys that leave one of {names}: nothing says how many heads {plan.model} has"
        raise ConfigError([Problem(ALGORITHM, section.algorithm, accepted)])
    # A sequence that is long enough for every algorithm.
    choose_for(section, Layer(shape, 2 * degrees.cp), degrees)
    if len(found) == 1:
        return found[0]

    def chosen(samples: int, length: int) -> ContextAlgorithm:
        # DeepSpeed has cast the model by now.
        number_bytes = next(build.model.parameters()).element_size()
        choice = choose_for(section, Layer(shape, length, samples, number_bytes), degrees)
        sizes = f"{samples} x {length:,} tokens, {shape}, {degrees.cp} ranks"
        logger().info("context_parallel: %s, %s (%s)", described(choice.algorithm), choice.reason, sizes)
        return choice.algorithm

    return chosen


CONTEXT_PARALLEL: Feature[ContextParallelSection] = Feature("context_parallel", apply=_apply)


def algorithms(section: ContextParallelSection, context: int) -> list[ContextAlgorithm]:
    """All that the keys of ``section`` allow for ``context`` ranks (2 or more): none where they contradict."""
    found = [algorithm_of(name, context, kv_cache=section.kv_cache) for name in ("ulysses", "allgather")]
    for ulysses in _divisors(context)[:-1]:
        # An inner ring of all ranks is a single ring.
        for window in _divisors(context // ulysses)[:-1]:
            name: AlgorithmName = "ring" if ulysses == 1 else "hybrid"
            found.append(algorithm_of(name, context, ulysses, window, section.kv_cache))
    return [each for each in found if _fits(section, each)]


def _fits(section: ContextParallelSection, algorithm: ContextAlgorithm) -> bool:
    window = 1 if section.window == algorithm.ring and not algorithm.gather else section.window
    return (
        section.algorithm in (None, algorithm.name)
        and section.ulysses in (None, algorithm.ulysses)
        and window in (None, algorithm.window)
    )


def wrong_factors(section: ContextParallelSection, context: int) -> Iterator[Problem]:
    """The key that leaves no algorithm for ``context`` ranks."""
    # The one algorithm that is not known from its name alone.
    unsaid = section.algorithm == "hybrid" and section.ulysses is None
    if algorithms(section, context) and not unsaid:
        return
    where = f", for {context} ranks of ds_npu.parallel.context"
    where += f" with algorithm {section.algorithm!r}" if section.algorithm else ""
    any_window = section.model_copy(update={"window": None})
    any_factors = any_window.model_copy(update={"ulysses": None})
    if (left := algorithms(any_window, context)) and not unsaid:
        where += f" and ulysses {section.ulysses}" if section.ulysses else ""
        sizes = {size for each in left for size in _divisors(1 if each.gather else each.ring)}
        yield Problem(WINDOW, section.window, _listed(sizes, "left out") + where)
    elif left := algorithms(any_factors, context):
        other = () if section.algorithm == "hybrid" else ("left out",)
        yield Problem(ULYSSES, section.ulysses, _listed({each.ulysses for each in left}, *other) + where)
    else:
        accepted = f"another one: the {context} ranks of ds_npu.parallel.context are no groups in a ring"
        yield Problem(ALGORITHM, section.algorithm, accepted)


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


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return [*small, *(number // each for each in reversed(small) if each * each < number)]


def _listed(numbers: Iterable[int], *more: str) -> str:
    *rest, last = *map(str, sorted(numbers)), *more
    return f"{', '.join(rest)} or {last}" if rest else last
