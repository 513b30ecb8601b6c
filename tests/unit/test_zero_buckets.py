"""What a config says of how ZeRO communicates."""

from __future__ import annotations

import pytest

from ds_npu.config.zero_buckets import communication_line, why_not_in_buckets, why_not_planned

BUCKETS = {"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}, "bf16": {"enabled": True}}


def zero(**keys: object) -> dict[str, object]:
    return BUCKETS | {"zero_optimization": {"stage": 1, **keys}}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (zero(overlap_comm=False), "zero_optimization.overlap_comm is false: "),
        (zero(reduce_scatter=False), "zero_optimization.reduce_scatter is false: "),
        (zero(contiguous_gradients=False), "zero_optimization.contiguous_gradients is false: "),
        (zero(round_robin_gradients=True), "zero_optimization.round_robin_gradients is true: "),
        (zero(offload_optimizer={"device": "cpu"}), "zero_optimization.offload_optimizer: "),
        (BUCKETS | {"managed_gradient_accumulation": False}, "managed_gradient_accumulation is false: "),
        (BUCKETS | {"compile": {"deepcompile": True}}, "compile.deepcompile is true: "),
        (BUCKETS | {"data_types": {"grad_accum_dtype": "fp32"}}, "data_types.grad_accum_dtype is float32: "),
    ],
)
def test_what_deepspeeds_own_code_does_is_told_with_its_key(config, reason):
    assert why_not_in_buckets(config).startswith(reason)
    assert communication_line(config, 2, 1).startswith("DeepSpeed's own code reduces gradients")


@pytest.mark.parametrize(
    "config",
    [
        BUCKETS,
        zero(overlap_comm=True),
        zero(overlap_comm="auto", offload_optimizer={"device": "none"}),
        {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    ],
)
def test_other_configs_have_buckets(config):
    assert why_not_in_buckets(config) is None
    assert communication_line(config, 2, 1).startswith("Gradients are reduce-scattered in buckets behind the backward")
    assert "behind the schedule" in communication_line(config, 2, 4)
    assert communication_line(config, 1, 1) is None


def test_nothing_is_said_without_zero():
    assert communication_line({"zero_optimization": {"stage": 0}}, 2, 1) is None


def zero_3(**keys: object) -> dict[str, object]:
    return BUCKETS | {"zero_optimization": {"stage": 3, **keys}}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (zero_3(overlap_comm=False), "zero_optimization.overlap_comm is false: "),
        (zero_3(stage3_prefetch_bucket_size=0), "zero_optimization.stage3_prefetch_bucket_size is 0: "),
        (zero_3(stage3_allgather_sequential=True), "zero_optimization.stage3_allgather_sequential is true: "),
        (zero_3(zero_quantized_weights=True), "zero_optimization.zero_quantized_weights is true: "),
        (zero_3(offload_param={"device": "cpu"}), "zero_optimization.offload_param.device: "),
        (zero_3(zero_hpz_partition_size=2), "zero_optimization.zero_hpz_partition_size: "),
        (zero_3(stage3_module_granularity_threshold=10), "zero_optimization.stage3_module_granularity_threshold: "),
        (zero_3() | {"compile": {"deepcompile": True}}, "compile.deepcompile is true: "),
    ],
)
def test_what_deepspeeds_own_code_gathers_is_told_with_its_key(config, reason):
    assert why_not_planned(config).startswith(reason)
    assert communication_line(config, 2, 1).startswith("DeepSpeed's own code gathers weights")


@pytest.mark.parametrize(
    "config",
    [zero_3(), zero_3(stage3_prefetch_bucket_size="auto", offload_param={"device": "none"}), zero_3(overlap_comm=True)],
)
def test_other_configs_gather_by_a_plan(config):
    assert why_not_planned(config) is None
    assert communication_line(config, 2, 1).startswith("Weights are gathered in few messages")
    assert communication_line(config, 1, 1) is None
