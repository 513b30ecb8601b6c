"""``ds_npu.context_parallel``: shards the sequences of a build's model over the context ranks."""

from __future__ import annotations

import torch

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.config.context_parallel import ALGORITHM, ContextParallelSection, algorithms
from ds_npu.config.problems import ConfigError, Problem
from ds_npu.features.build import Build
from ds_npu.features.context_parallel.algorithm_choice import AlgorithmChooser
from ds_npu.features.context_parallel.sharded_sequences import (
    has_sharded_sequences,
    shard_sequences,
    shardable_model,
)
from ds_npu.features.feature import Feature
from ds_npu.log import logger, warn_once
from ds_npu.models.hugging_face_model import hugging_face_model
from ds_npu.parallel.tensor.randomness import align_generators
from ds_npu.planner.context_choice import algorithm_text, choose_for
from ds_npu.planner.context_cost import Layer
from ds_npu.topology.machine import Machine, machine_of

NOT_SHARDED = (
    "ds_npu.parallel.context is {size}, and {model} holds no model of transformers: its sequences are not divided. "
    "Give each context rank other tokens, compute attention by ds_npu.parallel.context_attention, "
    "and return each rank's share of the loss; shares are added up"
)


def _apply(section: ContextParallelSection, build: Build) -> None:
    if not build.shards_sequences or has_sharded_sequences(build.model):
        return
    topology = build.topology
    if hugging_face_model(build.model) is None:
        warn_once(NOT_SHARDED.format(size=topology.size("cp"), model=type(build.model).__name__))
        return
    shardable_model(build.model, build.partial_plan)
    algorithm = _algorithm(section, build)
    # What scripts draw (the order of samples) must agree over ranks that share samples.
    align_generators(topology, build.device_type, "cp")
    shard_sequences(build.model, build.partial_plan, topology, algorithm, build.device_type)


def _algorithm(section: ContextParallelSection, build: Build) -> ContextAlgorithm | AlgorithmChooser:
    """The one algorithm that ``section`` leaves, or what chooses one for the first batch.

    Raises ConfigError where no algorithm is possible with the model's number of heads.
    """
    degrees, plan, machine = build.topology.degrees, build.partial_plan, _machine(build.device_type)
    # The attention with the fewest heads limits Ulysses most.
    shape = min(plan.attentions.values(), key=lambda each: each.heads, default=None)
    found = algorithms(section, degrees.cp)
    if shape is None:
        if len(found) == 1:
            return found[0]
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


def _machine(device_type: str) -> Machine:
    """Whose speeds the estimates assume: this process's NPU's, elsewhere an A2's."""
    return machine_of("" if device_type == "cpu" else torch.get_device_module(device_type).get_device_name())


CONTEXT_PARALLEL: Feature[ContextParallelSection] = Feature("context_parallel", apply=_apply)
