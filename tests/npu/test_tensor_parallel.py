"""A model sharded over simulated NPUs: one step of DeepSpeed's engine over HCCL, against one process on the CPU."""

from __future__ import annotations

import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import torch
from ranks import run_on_ranks

from ds_npu.ops import matmul_collective

WIDE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512}
"""Each rank's inner dimensions are within the fused kernels' limits."""
SEQUENCE = {"parallel": {"tensor": 2, "sequence_parallel": True}}


def step(family: str, section: dict, stage: int, fused_calls: int, changes: dict) -> None:
    """bf16 within twice the error of one process."""
    from ds_npu.ops.npu import matmul_collective as kernels

    calls = []
    for name in ("all_gather_matmul", "matmul_reduce_scatter"):
        original = vars(kernels)[name]
        setattr(kernels, name, lambda *args, original=original: calls.append(original) or original(*args))
    expected = tensor_rule.reference(family, 1, dtype=torch.float64, start=torch.bfloat16, **changes)
    # The engine first: nothing here sets the device.
    errors = tensor_rule.engine_step(family, stage, torch.bfloat16, section, expected, **changes)
    single = tensor_rule.reference(family, 1, dtype=torch.bfloat16, start=torch.bfloat16, device="npu", **changes)
    bound = 2 * rule.relative(single.gradients, expected.gradients)
    assert max(errors.gradient, errors.norm) <= bound and errors.loss <= 4e-3, (errors, bound)
    assert len(calls) == fused_calls, len(calls)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_with_sequence_parallelism(stage):
    run_on_ranks(2, step, "qwen3", SEQUENCE, stage, 0, {}, backend="hccl", sets_device=False)


def test_a_step_in_pieces():
    section = SEQUENCE | {"tensor_overlap": "pipelined"}
    run_on_ranks(2, step, "llama", section, 1, 0, {}, backend="hccl", sets_device=False)


def test_a_step_as_estimates_say():
    """The same kernels: the messages of dx, of several products, are hidden behind weight gradients."""
    blocks, micro_batches = 2, 2
    run_on_ranks(2, step, "llama", SEQUENCE, 1, blocks * micro_batches * 5, WIDE, backend="hccl", sets_device=False)


@pytest.mark.parametrize("section", [{}, {"tensor_overlap": "fused"}], ids=["left out", "fused"])
def test_a_step_of_shards_that_only_one_rank_could_fuse(section):
    """Of 511 inputs of the MLP one rank has 256, which a kernel takes, and the other 255."""
    changes = WIDE | {"intermediate_size": 511}
    run_on_ranks(2, step, "llama", SEQUENCE | section, 1, 2 * 2 * 4, changes, backend="hccl", sets_device=False)


def test_a_step_in_fused_kernels():
    """Of each block and micro-batch, inputs of 256: qkv and gate-up forward; dy of o and down backward.

    The products that end regions have 128 inputs of a rank (heads) or 256 (the MLP): the latter is fused.
    """
    section = SEQUENCE | {"tensor_overlap": "fused"}
    assert 256 in matmul_collective.INNER
    assert 128 not in matmul_collective.INNER
    blocks, micro_batches = 2, 2
    run_on_ranks(2, step, "llama", section, 1, blocks * micro_batches * 5, WIDE, backend="hccl", sets_device=False)
