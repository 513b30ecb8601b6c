"""``ds_npu.context_parallel``: how the ranks that share a sequence compute attention over it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from ds_npu.config.context_algorithm import AlgorithmName, ContextAlgorithm, KvCache, algorithm_of
from ds_npu.config.problems import Problem
from ds_npu.config.section import ContextRanks, Section


class ContextParallelSection(Section):
    """How attention runs over a sequence sharded along ``parallel.context``."""

    algorithm: AlgorithmName | None = None
    """Exchange heads (ulysses), pass keys and values around (ring), both (hybrid), or gather them; left out: chosen."""
    ulysses: ContextRanks | None = None
    """Ranks of the Ulysses groups inside the context axis; the ring has context / ulysses ranks. Left out: chosen."""
    window: ContextRanks | None = None
    """Ranks of the inner ring where the ring is a ring of rings; 1 is a single ring. Left out: chosen."""
    kv_cache: KvCache | None = None
    """Received keys and values that backward keeps: none, the keys (half), both (full); left out: those of Ulysses."""


ALGORITHM, ULYSSES, WINDOW = (f"ds_npu.context_parallel.{key}" for key in ("algorithm", "ulysses", "window"))


def algorithms(section: ContextParallelSection, context: int) -> list[ContextAlgorithm]:
    """All algorithms that ``section`` allows for ``context`` ranks (2 or more): none where its keys contradict."""
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
    # The hybrid is the one algorithm that is not known from its name alone.
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
        yield Problem(
            ALGORITHM,
            section.algorithm,
            f"another one: the {context} ranks of ds_npu.parallel.context are no groups in a ring",
        )


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return [*small, *(number // each for each in reversed(small) if each * each < number)]


def _listed(numbers: Iterable[int], *more: str) -> str:
    *rest, last = *map(str, sorted(numbers)), *more
    return f"{', '.join(rest)} or {last}" if rest else last
