"""Whether ZeRO communicates in buckets, and gathers by a plan, behind other work, as far as a config tells it."""

from __future__ import annotations

from typing import Any

from ds_npu.config.deepspeed_keys import value_at, zero_stage
from ds_npu.config.problems import Config

ZERO = "zero_optimization"
SET: tuple[tuple[str, Any, str], ...] = (
    (f"{ZERO}.overlap_comm", False, "nothing is to overlap"),
    (f"{ZERO}.reduce_scatter", False, "gradients are to be all-reduced"),
    (f"{ZERO}.use_multi_rank_bucket_allreduce", False, "each part of a bucket is to be reduced by itself"),
    (f"{ZERO}.contiguous_gradients", False, "gradients are not to be copied into buckets"),
    (f"{ZERO}.round_robin_gradients", True, "weights have an order of their own"),
    (f"{ZERO}.elastic_checkpoint", True, "partitions are saved in a form of their own"),
    ("managed_gradient_accumulation", False, "the step reduces gradients"),
    ("compile.deepcompile", True, "the compiled backward reduces gradients"),
    ("torch_autocast.enabled", True, "gradients have several dtypes"),
)
"""Keys of DeepSpeed, the value with which DeepSpeed's own code does the communication, and why."""

PREFETCH = f"{ZERO}.stage3_prefetch_bucket_size"
SET_3: tuple[tuple[str, Any, str], ...] = (
    (f"{ZERO}.overlap_comm", False, "nothing is to overlap"),
    (PREFETCH, 0, "nothing is to be gathered ahead"),
    (f"{ZERO}.stage3_use_all_reduce_for_fetch_params", True, "weights are to be all-reduced"),
    (f"{ZERO}.stage3_allgather_sequential", True, "weights are to be gathered one by one"),
    (f"{ZERO}.zero_quantized_weights", True, "weights are to be sent quantised"),
    (f"{ZERO}.zero_quantized_nontrainable_weights", True, "weights are kept quantised"),
    ("compile.deepcompile", True, "compiled graphs gather weights"),
    ("torch_autocast.enabled", True, "weights are sent in several dtypes"),
)
"""The same for ZeRO 3."""


BUCKET_SIZE = 500_000_000
"""DeepSpeed's own reduce_bucket_size and allgather_bucket_size, in elements."""


def stated_bucket_limits(ds_config: Config) -> list[int]:
    """The most elements of a bucket; "auto" counts as DeepSpeed's own size."""
    found = [value_at(ds_config, f"{ZERO}.{name}_bucket_size") for name in ("reduce", "allgather")]
    return [BUCKET_SIZE if each in (None, "auto") else int(each) for each in found]


def why_not_in_buckets(ds_config: Config) -> str | None:
    """The key of ``ds_config``, and the reason, for which DeepSpeed's own code reduces gradients; None without one."""
    if reason := _set_to(ds_config, SET):
        return reason
    if value_at(ds_config, f"{ZERO}.offload_optimizer.device") not in (None, "none"):
        return f"{ZERO}.offload_optimizer: gradients are added up on the host"
    in_float32 = value_at(ds_config, "data_types.grad_accum_dtype") in ("fp32", "float32")
    if in_float32 and value_at(ds_config, "bf16.enabled") is True and zero_stage(ds_config) == 1:
        return "data_types.grad_accum_dtype is float32: BF16_Optimizer adds gradients up"
    return None


SET_3_GRADIENTS: tuple[tuple[str, Any, str], ...] = (
    (f"{ZERO}.overlap_comm", False, "nothing is to overlap"),
    (f"{ZERO}.reduce_scatter", False, "gradients are to be all-reduced"),
    (f"{ZERO}.zero_quantized_gradients", True, "gradients are to be sent quantised"),
    ("compile.deepcompile", True, "the compiled backward reduces gradients"),
    ("torch_autocast.enabled", True, "gradients have several dtypes"),
)
"""The same for the gradients of ZeRO 3."""


def why_not_scattered(ds_config: Config) -> str | None:
    """The key of ``ds_config``, and the reason, for which DeepSpeed's own code sends ZeRO 3's gradients; or None."""
    if reason := _set_to(ds_config, SET_3_GRADIENTS):
        return reason
    if value_at(ds_config, f"{ZERO}.offload_optimizer.device") not in (None, "none"):
        return f"{ZERO}.offload_optimizer: gradients are added up on the host"
    if value_at(ds_config, f"{ZERO}.zenflow") is not None:
        return f"{ZERO}.zenflow: it picks gradients apart"
    if value_at(ds_config, "gradient_predivide_factor") not in (None, 1):
        return "gradient_predivide_factor: gradients are divided before they are summed up"
    return None


def why_not_planned(ds_config: Config) -> str | None:
    """The key of ``ds_config``, and the reason, for which DeepSpeed's own code gathers weights of ZeRO 3; or None."""
    if reason := _set_to(ds_config, SET_3):
        return reason
    others = {"offload_param.device": "none", "zero_hpz_partition_size": 1, "stage3_module_granularity_threshold": 0}
    for name, plain in {**others, "zenflow": None}.items():
        if value_at(ds_config, f"{ZERO}.{name}") not in (None, plain):
            return f"{ZERO}.{name}: weights are kept or gathered in a form of their own"
    return None


def _set_to(ds_config: Config, keys: tuple[tuple[str, Any, str], ...]) -> str | None:
    for key, value, why in keys:
        found = value_at(ds_config, key)
        if found == value and type(found) is type(value):
            return f"{key} is {str(value).lower()}: {why}"
    return None


def communication_line(ds_config: Config, ranks: int, pipeline: int) -> str | None:
    """How ZeRO communicates among ``ranks`` ranks of each of ``pipeline`` stages; None if nothing is to be said."""
    if zero_stage(ds_config) not in (1, 2, 3) or ranks == 1:
        return None
    if zero_stage(ds_config) == 3:
        if reason := why_not_planned(ds_config):
            return f"DeepSpeed's own code gathers weights, about one in a message: {reason}"
        return "Weights are gathered in few messages, behind what is computed, as the first micro-batch used them"
    if reason := why_not_in_buckets(ds_config):
        return f"DeepSpeed's own code reduces gradients and gathers weights, and the step waits for it: {reason}"
    behind = "the backward" if pipeline == 1 else "the schedule of the pipeline"
    return f"Gradients are reduce-scattered in buckets behind {behind}, weights gathered behind the next forward"
