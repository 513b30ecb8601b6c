"""``ds_npu.context_parallel``: how the ranks that share a sequence compute attention over it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Literal

from ds_npu.config import Problem, Section
from ds_npu.features.feature import AtLeastOne, Build, Feature
from ds_npu.log import warn_once
from ds_npu.topology.context import algorithm_of


class ContextParallelSection(Section):
    """How attention runs over a sequence split along ``parallel.context``."""

    algorithm: Literal["ulysses", "ring", "hybrid", "allgather"] | None = None
    """Exchange heads (ulysses), pass keys and values around (ring), both (hybrid), or gather them; left out: chosen."""
    ulysses: AtLeastOne | None = None
    """Ranks of the Ulysses groups inside the context axis; the ring has context / ulysses ranks."""
    window: AtLeastOne = 1
    """Ranks of the inner ring where the ring is a ring of rings; 1 is a single ring."""
    kv_cache: Literal["none", "half", "full"] = "none"
    """What is kept for backward of the keys and values received in forward: nothing, the keys (half), both (full)."""


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
    # What scripts draw (the order of samples) must agree over ranks that share samples.
    importlib.import_module("ds_npu.parallel.tensor.randomness").align_generators(topology, build.device_type, "cp")
    algorithm = algorithm_of(section.algorithm or "ulysses", topology.size("cp"), section.ulysses, section.window)
    models.spread_sequence(build.model, build.plan, topology, algorithm, build.device_type)


CONTEXT_PARALLEL: Feature[ContextParallelSection] = Feature("context_parallel", apply=_apply)


def wrong_factors(section: ContextParallelSection, context: int) -> Iterator[Problem]:
    """Ulysses and ring sizes that the context axis cannot be cut into."""
    ulysses = section.ulysses or 1
    if context % ulysses:
        accepted = f"a divisor of ds_npu.parallel.context, which is {context}"
        yield Problem("ds_npu.context_parallel.ulysses", ulysses, accepted)
    elif section.algorithm == "hybrid" and ulysses == 1:
        accepted = "with algorithm 'hybrid', an integer > 1 that divides ds_npu.parallel.context"
        yield Problem("ds_npu.context_parallel.ulysses", section.ulysses, accepted)
    elif section.algorithm in ("ring", "allgather") and ulysses > 1:
        accepted = f"nothing but 1 with algorithm {section.algorithm!r}; 'hybrid' has both"
        yield Problem("ds_npu.context_parallel.ulysses", ulysses, accepted)
    else:
        ring = 1 if section.algorithm in ("ulysses", "allgather") else context // ulysses
        if ring % section.window:
            accepted = f"a divisor of the ring's size, which is {ring}"
            yield Problem("ds_npu.context_parallel.window", section.window, accepted)
