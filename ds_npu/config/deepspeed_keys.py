"""DeepSpeed's own keys that ask for the same things as the section, or that cannot go with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from ds_npu.config.deepspeed_readers import NOTHING, value_of, zero_section
from ds_npu.config.deepspeed_schema import is_auto, schema
from ds_npu.config.parallel import ParallelSection
from ds_npu.config.problems import Config, Problem, printable
from ds_npu.config.reading import near_miss
from ds_npu.config.sections import DsNpuConfig, switched_on

SIZES = {"sequence_parallel_size": "context", "pipeline.stages": "pipeline"}
"""DeepSpeed's keys that state the size of an axis, which must be the size in ``parallel``."""

KERNEL = "its kernel is not there for NPUs and CPUs, so it was not tried"
ZERO_PLUS_PLUS: dict[str, tuple[int, str]] = {
    "zero_hpz_partition_size": (
        1,
        "DeepSpeed joins ranks next to each other, which are tensor ranks, whose shards differ",
    ),
    "zero_quantized_weights": (False, KERNEL),
    "zero_quantized_nontrainable_weights": (False, KERNEL),
}
"""DeepSpeed's keys of ZeRO++: the value that turns each off, and why tensor ranks refuse others."""
STATE_LOCATION = "it decides where the optimizer's state is, and so does"
UNTRIED = "it was not tried with"
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "zero_optimization.offload_optimizer.device": (("none",), STATE_LOCATION),
    "zero_optimization.offload_param.device": (("none",), "the weights must be on the device for"),
    "zero_optimization.zenflow": ((), STATE_LOCATION),
    "zero_optimization.zero_hpz_partition_size": ((1,), UNTRIED),
    "zero_optimization.zero_quantized_weights": ((False,), UNTRIED),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), UNTRIED),
    "zero_optimization.round_robin_gradients": ((False,), UNTRIED),
    "bf16.bf16_master_weights_and_grads": ((False,), "there is no fp32 master weight for"),
    "bf16.bf16_optimizer_states": ((False,), "it keeps moments in bf16 by itself, beside"),
    "compile.deepcompile": ((False,), UNTRIED),
    "checkpoint.load_universal": ((False,), UNTRIED),
    "hybrid_engine.enabled": ((False,), UNTRIED),
}
"""DeepSpeed's keys: the accepted values, and why others are refused."""
ADAM = ("adam", "adamw")
SECTION = "ds_npu"
MOST_UNKNOWN = 100
"""Unknown top-level keys that are compared with known ones."""


def value_at(ds_config: Config, path: str) -> Any:
    """The value at a dotted path; None where it is missing, or "auto" (not known yet)."""
    value = value_of(ds_config, path)
    return None if value is NOTHING or is_auto(value) else value


def zero_stage(ds_config: Config) -> int | None:
    """The ZeRO stage that the config asks for; None where it is not known ("auto", or the section is wrong)."""
    read = zero_section(ds_config)
    is_known = not read.problems and not is_auto(value_of(ds_config, "zero_optimization.stage"))
    return int(read.values["stage"]) if is_known else None


def conflicts(ds_config: Config, config: DsNpuConfig, dp: int | None, doubtful: frozenset[str]) -> Iterator[Problem]:
    """Contradictions between DeepSpeed's keys and the section; ``doubtful`` keys are passed over."""
    sizes = dict(config.parallel)
    for key, axis in SIZES.items():
        found = value_at(ds_config, key)
        if found not in (None, sizes[axis]) and f"parallel.{axis}" not in doubtful:
            yield Problem(key, found, f"the same as ds_npu.parallel.{axis}, which is {sizes[axis]}")
    found = value_at(ds_config, "data_parallel_size")
    if dp is not None and found not in (None, dp):
        yield Problem("data_parallel_size", found, f"{dp}, what the degrees in ds_npu.parallel leave of the world")
    yield from _other_engines(ds_config, config)
    yield from _recomputed_twice(ds_config, config)
    yield from _plus_plus(ds_config, config)
    if not any(path.startswith("parallel.") for path in doubtful):
        yield from _ranks_taken_for_alike(ds_config, config.parallel)
    yield from _optimizer_memory(ds_config, config)


def _other_engines(ds_config: Config, config: DsNpuConfig) -> Iterator[Problem]:
    """DeepSpeed's AutoTP and AutoEP bring their own process groups."""
    autotp = value_at(ds_config, "tensor_parallel.autotp_size")
    if autotp not in (None, 0, 1):
        yield Problem(
            "tensor_parallel.autotp_size",
            autotp,
            "0 or 1 beside a ds_npu section (see ds_npu.parallel.tensor): AutoTP replaces its process groups",
        )
    autoep = value_at(ds_config, "expert_parallel.autoep_size")
    expert = config.parallel.expert
    if value_at(ds_config, "expert_parallel.enabled") and (autoep not in (None, 1) or expert > 1):
        yield Problem(
            "expert_parallel.autoep_size",
            autoep,
            f"1, with ds_npu.parallel.expert 1 (found {expert}): AutoEP makes its own process groups",
        )


def _ranks_taken_for_alike(ds_config: Config, parallel: ParallelSection) -> Iterator[Problem]:
    """Keys with which DeepSpeed takes all ranks for data ranks and does not ask the topology (its ``mpu``)."""
    sharing = parallel.tensor * parallel.context * parallel.pipeline
    path = "zero_optimization.zero_quantized_gradients"
    if value_at(ds_config, path) and sharing > 1:
        yield Problem(
            path,
            True,
            "false with ds_npu.parallel.tensor, context or pipeline > 1: DeepSpeed averages such gradients over all "
            "ranks of the world, as if each had samples of its own",
        )
    path = "autotuning.model_info.profile"
    if value_at(ds_config, path) and sharing > 1:
        yield Problem(
            path,
            True,
            "false, or ds_npu.parallel.tensor, context and pipeline 1: deepspeed --autotuning divides the "
            "parameters of a rank, which has a part of them, by mp_size once more. Compare "
            "batch sizes without it: ds_npu check --model estimates bytes, a run's log has tokens per second",
        )
        return
    path = "autotuning.mp_size"
    found = value_at(ds_config, path)
    if value_at(ds_config, "autotuning.enabled") and (1 if found is None else found) != sharing:
        yield Problem(
            path,
            found,
            f"{sharing}, the product of ds_npu.parallel.tensor, context and pipeline, by which the autotuner derives "
            "batch sizes",
        )


def _recomputed_twice(ds_config: Config, config: DsNpuConfig) -> Iterator[Problem]:
    theirs = value_at(ds_config, "activation_checkpointing")
    ours = [path for path, _ in switched_on(config.recompute, "ds_npu.recompute.")]
    if isinstance(theirs, dict) and any(theirs.values()) and ours:
        yield Problem(
            "activation_checkpointing", theirs, f"nothing, or nothing at {', '.join(ours)}: both recompute activations"
        )


def _plus_plus(ds_config: Config, config: DsNpuConfig) -> Iterator[Problem]:
    """ZeRO++ knows no tensor ranks (deepspeed/utils/groups.py, _create_zero_param_parallel_group)."""
    tensor = config.parallel.tensor
    for key, (off, why) in ZERO_PLUS_PLUS.items():
        found = value_at(ds_config, f"zero_optimization.{key}")
        if tensor > 1 and found not in (None, off):
            yield Problem(
                f"zero_optimization.{key}", found, f"{str(off).lower()} with ds_npu.parallel.tensor {tensor}: {why}"
            )


def _optimizer_memory(ds_config: Config, config: DsNpuConfig) -> Iterator[Problem]:
    asked = [path for path, _ in switched_on(config.optimizer_memory, "ds_npu.optimizer_memory.")]
    if not asked:
        return
    keys = ", ".join(asked)
    # "auto": the Trainer and accelerate have not filled it in yet.
    if not value_at(ds_config, "bf16.enabled") and not is_auto(value_of(ds_config, "bf16.enabled")):
        yield Problem("bf16.enabled", value_at(ds_config, "bf16.enabled"), f"true with {keys}; or leave {keys} out")
    optimizer = value_at(ds_config, "optimizer.type")
    if isinstance(optimizer, str) and optimizer.lower() not in ADAM:
        yield Problem(
            "optimizer.type",
            optimizer,
            f"'Adam' or 'AdamW' with {keys}, whose steps can be divided into chunks; or leave {keys} out",
        )
    for path, (fine, why) in REFUSED.items():
        found = value_at(ds_config, path)
        if found is not None and found not in fine:
            accepted = " or ".join(repr(each) for each in fine) or "nothing"
            yield Problem(path, found, f"{accepted}: {why} {keys}. Leave one of them out")
    if config.moe.placement_interval:
        yield Problem(
            "ds_npu.moe.placement_interval",
            config.moe.placement_interval,
            f"0 with {keys}: experts that move take the optimizer's state with them",
        )


def misspelt(ds_config: Config) -> list[str]:
    """Warnings about top-level keys that look like a misspelt known key.

    DeepSpeed would ignore them in silence.
    """
    known = {*schema().top_level, *schema().removed, SECTION}
    names = dict.fromkeys((SECTION, "npu", "deepspeed_npu"), SECTION) | {key: key for key in sorted(known)}
    warnings = []
    for key in itertools.islice((str(key) for key in ds_config if key not in known), MOST_UNKNOWN):
        for near in near_miss(key.lower(), names, cutoff=0.8):
            hint = "the section is called 'ds_npu'" if names[near] == SECTION else f"did you mean {names[near]!r}?"
            warnings.append(f"{printable(key)!r} is ignored: {hint}")
    return warnings
