"""What a config says of how ZeRO 1 and 2 communicate."""

from __future__ import annotations

import pytest

from ds_npu.config.zero_buckets import communication_line, why_not_in_buckets

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
        (BUCKETS | {"optimizer": {"type": "Muon"}}, "optimizer.type is Muon: "),
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


@pytest.mark.parametrize("stage", [0, 3])
def test_other_stages_are_deepspeeds(stage):
    assert communication_line({"zero_optimization": {"stage": stage}}, 2, 1) is None
