"""``ds_npu.context_parallel``: shards the sequences of a build's model over the context ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.config.context_parallel import ALGORITHM, ContextParallelSection, algorithms
from ds_npu.config.problems import ConfigError, Problem
from ds_npu.features.build import Build, Feature
from ds_npu.features.context_parallel.algorithm_choice import AlgorithmChooser
from ds_npu.features.context_parallel.probe import check_context_blocks
from ds_npu.features.context_parallel.sharded_sequences import (
    declare_sequences,
    has_sharded_sequences,
    shardable_model,
)
from ds_npu.features.declaration import Change, Phase
from ds_npu.log import logger, warn_once
from ds_npu.models.hugging_face_model import hugging_face_model
from ds_npu.models.linear_attention import linear_attentions
from ds_npu.planner.context_choice import algorithm_text, choose_for
from ds_npu.planner.context_cost import Layer


def _applies(build: Build) -> bool:
    return build.shards_sequences and hugging_face_model(build.model) is not None


def _asked(section: ContextParallelSection, build: Build) -> str:
    keys = "".join(f", {key} {value}" for key, value in section if value is not None)
    return f"context {build.topology.size('cp')}{keys}" if _applies(build) else ""


def _parts(section: ContextParallelSection, build: Build) -> Iterable[Change]:
    if not _applies(build):
        return
    yield build.same_random_numbers("cp", "context")
    if build.probes and not build.is_planned and not has_sharded_sequences(build.model):
        make = partial(check_context_blocks, build.model, build.partial_plan, build.topology)
        yield Change("checks", "probe of sequences", "a block of each kind, in parts of a sequence and whole", make)


def _declare(section: ContextParallelSection, build: Build) -> Iterable[Change]:
    if not _applies(build):
        if build.shards_sequences:
            warn_once(
                f"ds_npu.parallel.context is {build.topology.size('cp')}, and {type(build.model).__name__} holds no "
                "model of transformers: its sequences are not divided. Give each context rank other tokens, compute "
                "attention by ds_npu.parallel.context_attention, and return each rank's share of the loss; shares are "
                "added up"
            )
        return []
    if has_sharded_sequences(build.model):
        return []
    # Says why the model cannot be sharded before it looks for an algorithm.
    shardable_model(build.model, build.partial_plan)
    algorithm = _algorithm(section, build)
    return declare_sequences(build.model, build.partial_plan, build.topology, algorithm, build.device_type)


def _algorithm(section: ContextParallelSection, build: Build) -> ContextAlgorithm | AlgorithmChooser:
    """The one algorithm that ``section`` allows, or a function that chooses one for the first batch.

    Raises ConfigError where no algorithm is possible with the model's number of heads.
    """
    degrees = build.topology.degrees
    plan = build.partial_plan
    machine = build.machine
    # The attention with the fewest heads limits Ulysses most.
    shape = min(plan.attentions.values(), key=lambda each: each.heads, default=None)
    found = algorithms(section, degrees.cp)
    if shape is None:
        if len(found) == 1:
            return found[0]
        if section.algorithm is None and linear_attentions(build.model):
            # States pass from rank to rank fewest times where each rank's tokens are consecutive.
            return ContextAlgorithm(degrees.cp)
        names = ", ".join(sorted({each.name for each in found}))
        accepted = f"keys that leave one of {names}: nothing says how many heads {plan.model} has"
        raise ConfigError([Problem(ALGORITHM, section.algorithm, accepted)])
    # The shortest sequence that is long enough for every algorithm.
    choose_for(section, Layer(shape, 2 * degrees.cp), degrees, machine)
    if len(found) == 1:
        return found[0]

    def chosen(samples: int, length: int) -> ContextAlgorithm:
        # Read here: by the first forward, DeepSpeed has cast the model.
        number_bytes = next(build.model.parameters()).element_size()
        choice = choose_for(section, Layer(shape, length, samples, number_bytes), degrees, machine)
        sizes = f"{samples} x {length:,} tokens, {shape}, {degrees.cp} ranks"
        logger().info("context_parallel: %s, %s (%s)", algorithm_text(choice.algorithm), choice.reason, sizes)
        return choice.algorithm

    return chosen


def _without_plan(build: Build) -> str:
    if hugging_face_model(build.model) is None:
        return "context parallelism is the script's (ds_npu.parallel.context_attention)"
    try:
        shardable_model(build.model, build.partial_plan)
    except ValueError as error:
        why, *_ = str(error).partition(". What to do")
        return f"context parallelism does not work ({why})"
    return "context parallelism works"


CONTEXT_PARALLEL: Feature[ContextParallelSection] = Feature(
    "context_parallel",
    Phase.SEQUENCES,
    declare=_declare,
    parts=_parts,
    asked=_asked,
    without_plan=_without_plan,
)
