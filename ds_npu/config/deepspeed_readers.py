"""Demands of DeepSpeedConfig on DeepSpeed's own keys, checked here before anything runs.

``deepspeed_schema`` judges the closed sections. DEMANDS has the keys that DeepSpeed reads by hand, the functions below
what keys demand of each other. DeepSpeed raises an error for each (runtime/config.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ds_npu.config.deepspeed_schema import (
    Read,
    Values,
    converted,
    is_auto,
    is_torch_dtype,
    numbers,
    read_section,
    schema,
)
from ds_npu.config.problems import Config, Problem

NOTHING = object()
"""Stands for the value of a key that is left out."""
MASTERS = "bf16_master_weights_and_grads"


@dataclass(frozen=True)
class Demand:
    """A demand on the value at ``path``, where there is one."""

    path: str
    accepted: str
    holds: Callable[[Any], bool]
    since: tuple[int, ...] = ()
    """The first version of DeepSpeed that reads the key."""


def _one_of(*names: str, null: bool = False) -> tuple[str, Callable[[Any], bool]]:
    known = [name.lower() for name in names]
    words = "one of " + ", ".join(repr(name) for name in names) + (" or null" if null else "")
    return words, lambda value: (null and value is None) or (isinstance(value, str) and value.lower() in known)


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


OBJECT = ("an object", lambda value: isinstance(value, dict))
OBJECT_OR_NULL = ("an object or null", lambda value: isinstance(value, dict | None))
FLAG = ("true or false", lambda value: isinstance(value, int))
TEXT = ("a text that is not empty", bool)
INTEGER = ("an integer", lambda value: converted(int, value) is not None)
DTYPES = ("fp16", "bf16", "fp32")
AUTOCAST_DTYPES = [
    *("torch.float16", "fp16", "float16", "half", "torch.float32", "fp32", "float32", "float"),
    *("torch.int8", "int8", "torch.bfloat16", "bf16", "bfloat16"),
]

DEMANDS_OF_ALL = tuple(
    Demand(path, *wanted)
    for path, wanted in {
        "communication_data_type": _one_of(*DTYPES, null=True),
        "seq_parallel_communication_data_type": _one_of(*DTYPES, null=True),
        "gradient_allreduce_op": _one_of("mean", "sum"),
        "wall_clock_breakdown": FLAG,
        "vocabulary_size": ("an integer", lambda value: not value or isinstance(value, int | float)),
        "activation_checkpointing": OBJECT,
        "optimizer": OBJECT,
        "optimizer.type": ("a text or null", lambda value: value is None or isinstance(value, str)),
        "scheduler": OBJECT,
        "flops_profiler": OBJECT,
        "flops_profiler.enabled": FLAG,
        "autotuning": OBJECT,
        "autotuning.results_dir": TEXT,
        "autotuning.exps_dir": TEXT,
        "autotuning.model_info": OBJECT_OR_NULL,
        "pipeline": OBJECT,
        "data_efficiency": OBJECT,
        "data_efficiency.data_sampling": OBJECT,
        "data_efficiency.data_sampling.curriculum_learning": OBJECT,
        "data_efficiency.data_sampling.dynamic_batching": OBJECT,
        "data_efficiency.data_sampling.dynamic_batching.min_batch_size": INTEGER,
        "data_efficiency.data_sampling.dynamic_batching.max_batch_size": INTEGER,
        "data_efficiency.data_routing": OBJECT,
        "data_efficiency.data_routing.random_ltd": OBJECT,
        "checkpoint": OBJECT,
        "checkpoint.tag_validation": _one_of("Ignore", "Warn", "Fail"),
        "checkpoint.parallel_write": OBJECT,
        "checkpoint.parallel_write.pipeline_stage": ("true or false", lambda value: value in (True, False)),
        "checkpoint.writer": OBJECT_OR_NULL,
        "checkpoint.writer.type": _one_of("mock", "python", "fast", null=True),
        "checkpoint.writer.data_parallel": _one_of("replica", "socket", "machine", null=True),
        "data_types": OBJECT,
        "aio": OBJECT_OR_NULL,
        "aio.use_gds": ("false: GPUDirect Storage is CUDA's", lambda value: not value),
        "timers": OBJECT,
        "expert_parallel": ("an object", lambda value: not value or isinstance(value, dict)),
        "expert_parallel.load_balance_coeff": ("null: DeepSpeed's AutoEP has none", lambda value: value is None),
        "torch_autocast": OBJECT,
        "torch_autocast.dtype": (
            f"one of {', '.join(map(repr, AUTOCAST_DTYPES))}",
            lambda value: value in AUTOCAST_DTYPES if isinstance(value, str) else is_torch_dtype(value),
        ),
        "torch_autocast.lower_precision_safe_modules": ("a list, each item a string", _is_text_list),
    }.items()
)
DEMANDS = (
    *DEMANDS_OF_ALL,
    Demand(
        "data_types.keep_in_fp32_modules",
        "'auto' or a list, each item a string",
        lambda value: is_auto(value) or (isinstance(value, list) and _is_text_list(value)),
        since=(0, 19, 8),
    ),
)


def deepspeed_problems(ds_config: Config) -> Iterator[Problem]:
    """The mistakes that the installed DeepSpeed would refuse in ``ds_config``, but for batch sizes."""
    yield from _removed(ds_config)
    reads = dict(_sections(ds_config))
    for read in reads.values():
        yield from read.problems
    broken = [*_broken_demands(ds_config)]
    yield from broken
    # Rules read only sections without mistakes.
    values = {path: read.values for path, read in reads.items() if not read.problems}
    for rule in (_two_types, _summed_gradients, _sharded_masters, _disks_without_folder):
        yield from rule(ds_config, values)
    if not broken:
        yield from _optimizer(ds_config)
        yield from _sampling(ds_config)


def value_of(ds_config: Config, path: str) -> Any:
    """The value at a dotted path; NOTHING where there is none."""
    value: Any = ds_config
    for part in path.split("."):
        value = value.get(part, NOTHING) if isinstance(value, dict) else NOTHING
    return value


def zero_section(ds_config: Config) -> Read:
    """``zero_optimization`` as DeepSpeed reads it; also its old form, true or false."""
    node = schema().sections["zero_optimization"]
    found = ds_config.get("zero_optimization", {})
    if isinstance(found, dict):
        found = {key: value for key, value in found.items() if key not in schema().removed_from_zero}
    if not isinstance(found, bool):
        return read_section(node, found, "zero_optimization")
    old = {"stage": 1, "allgather_bucket_size": ds_config.get("allgather_size", 5e8)} if found else {"stage": 0}
    return read_section(node, old, "zero_optimization")


def _removed(ds_config: Config) -> Iterator[Problem]:
    zero = {f"zero_optimization.{key}": message for key, message in schema().removed_from_zero.items()}
    for path, message in (schema().removed | zero).items():
        if (found := value_of(ds_config, path)) is not NOTHING:
            yield Problem(path, found, f"no such key in DeepSpeed {schema().version}: {message}")


def _sections(ds_config: Config) -> Iterator[tuple[str, Read]]:
    for path, node in schema().sections.items():
        found = value_of(ds_config, path)
        if path == "zero_optimization":
            yield path, zero_section(ds_config)
        elif path == "bfloat16" and _bf16(ds_config) != path:
            continue
        else:
            left_out = found is NOTHING or (path == "bf16" and found is None)
            filled_in = path in ("tensorboard", "wandb", "csv_monitor", "comet") and is_auto(found)
            yield path, read_section(node, {} if left_out or filled_in else found, path)


def _broken_demands(ds_config: Config) -> Iterator[Problem]:
    for demand in DEMANDS:
        found = value_of(ds_config, demand.path)
        if found is not NOTHING and numbers(schema().version) >= demand.since and not demand.holds(found):
            yield Problem(demand.path, found, demand.accepted)


def _optimizer(ds_config: Config) -> Iterator[Problem]:
    params = value_of(ds_config, "optimizer.params")
    if value_of(ds_config, "optimizer.type") in (NOTHING, None) or params is NOTHING:
        return
    if not isinstance(params, dict | None):
        yield Problem("optimizer.params", params, "an object or null")
    norm = value_of(ds_config, "optimizer.params.max_grad_norm")
    if norm is not NOTHING and not isinstance(norm, int | float):
        yield Problem("optimizer.params.max_grad_norm", norm, "a number; better, gradient_clipping in its place")


def _sampling(ds_config: Config) -> Iterator[Problem]:
    path = "data_efficiency.data_sampling"
    for part, key in (("curriculum_learning", "curriculum_metrics"), ("dynamic_batching", "max_tokens")):
        found, enabled = (value_of(ds_config, f"{path}.{part}.{each}") for each in (key, "enabled"))
        if enabled is NOTHING or not enabled:
            continue
        if found is NOTHING:
            yield Problem(f"{path}.{part}.{key}", None, f"a value, as {part} is enabled")
        elif key == "max_tokens" and converted(int, found) is None:
            yield Problem(f"{path}.{part}.{key}", found, "an integer")


def _two_types(ds_config: Config, sections: dict[str, Values]) -> Iterator[Problem]:
    bf16 = _bf16(ds_config)
    if sections.get("fp16", {}).get("enabled") and sections.get(bf16, {}).get("enabled"):
        yield Problem(f"fp16.enabled, {bf16}.enabled", [True, True], "true for one of them: a model has one type")


def _summed_gradients(ds_config: Config, sections: dict[str, Values]) -> Iterator[Problem]:
    found = ds_config.get("gradient_allreduce_op")
    if not isinstance(found, str) or found.lower() != "sum":
        return
    zero = sections.get("zero_optimization", {})
    against = {
        "zero_optimization.stage 3": zero.get("stage") == 3,
        "zero_optimization.zenflow": zero.get("zenflow") is not None,
        "compile.deepcompile": sections.get("compile", {}).get("deepcompile"),
    }
    for other, is_on in against.items():
        if is_on:
            yield Problem("gradient_allreduce_op", found, f"'mean' with {other}")


def _sharded_masters(ds_config: Config, sections: dict[str, Values]) -> Iterator[Problem]:
    unsharded = sections.get("zero_optimization", {}).get("stage") == 0
    bf16 = _bf16(ds_config)
    for section, key in (("fp16", "fp16_master_weights_and_grads"), (bf16, MASTERS), (bf16, "bf16_optimizer_states")):
        if unsharded and sections.get(section, {}).get(key):
            yield Problem(f"{section}.{key}", True, "false without ZeRO: zero_optimization.stage is 0")
    values = sections.get(bf16, {})
    if values.get("bf16_optimizer_states") and not values[MASTERS]:
        yield Problem(f"{bf16}.bf16_optimizer_states", True, f"false, or {bf16}.{MASTERS} true")


def _disks_without_folder(ds_config: Config, sections: dict[str, Values]) -> Iterator[Problem]:
    if sections.get("zero_optimization", {}).get("stage") != 3:
        return
    for what in ("offload_optimizer", "offload_param"):
        path = f"zero_optimization.{what}"
        if value_of(ds_config, f"{path}.device") == "nvme" and value_of(ds_config, f"{path}.nvme_path") in (
            NOTHING,
            None,
        ):
            yield Problem(f"{path}.nvme_path", None, f'the path of a folder on the disk, with {path}.device "nvme"')


def _bf16(ds_config: Config) -> str:
    """The name of the bf16 section: DeepSpeed reads the old name where the new one is left out."""
    return "bfloat16" if ds_config.get("bf16") is None else "bf16"
