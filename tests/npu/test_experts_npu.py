"""Experts over simulated NPUs: a layer and steps of DeepSpeed's engine over HCCL, against one process on the CPU."""

from __future__ import annotations

import expert_cases
import expert_rule
import gradient_rule as rule
import pytest
import tensor_parallel_rule as dense
import torch
from ranks import run_on_ranks

from ds_npu.ops.all import OPERATORS
from ds_npu.topology.degrees import Degrees

OF_EXPERTS = {"npu_grouped_matmul", "npu_moe_token_permute", "npu_moe_token_unpermute"}


def count_kernels() -> set[str]:
    """The functions of torch_npu that operators call from now on."""
    import torch_npu

    called: set[str] = set()
    for name in {name for operator in OPERATORS for name in operator.needs}:
        original = vars(torch_npu)[name]
        setattr(torch_npu, name, lambda *a, n=name, f=original, **k: called.add(n) or f(*a, **k))
    return called


def layers(degrees: Degrees) -> None:
    called = count_kernels()
    expert_cases.check_world(degrees, torch.float32, "npu")
    assert called >= OF_EXPERTS, called


@pytest.mark.parametrize("degrees", [Degrees(dp=2, ep=2), Degrees(tp=2, etp=2)], ids=str)
def test_a_layer(degrees):
    run_on_ranks(2, layers, degrees, backend="hccl", sets_device=True)


def step(family: str, parallel: dict, moe: dict, stage: int) -> None:
    """bf16 within twice the error of one process."""
    rule.without_extension()
    called = count_kernels()
    expected = dense.reference(family, _data_ranks(parallel), dtype=torch.float64, start=torch.bfloat16)
    section = {"parallel": parallel, "moe": moe}
    errors = expert_rule.engine_step(family, stage, torch.bfloat16, section, expected)
    single = dense.reference(family, _data_ranks(parallel), dtype=torch.bfloat16, start=torch.bfloat16, device="npu")
    bound = 2 * rule.relative(single.gradients, expected.gradients)
    assert max(errors.gradient, errors.norm) <= bound and errors.loss <= 4e-3, (errors, bound)
    assert called >= OF_EXPERTS, called


def _data_ranks(parallel: dict) -> int:
    return 2 // (parallel.get("tensor", 1) * parallel.get("context", 1))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    ("parallel", "moe"),
    [
        ({"expert": 2}, {"zero_memory": "level0"}),
        ({"expert": 2, "tensor": 2, "sequence_parallel": True}, {"dispatcher": "allgather"}),
        ({"expert_tensor": 2, "context": 2}, {"zero_memory": "level1"}),
    ],
    ids=str,
)
def test_a_step(family, parallel, moe):
    run_on_ranks(2, step, family, parallel, moe, 3, backend="hccl", sets_device=False)
