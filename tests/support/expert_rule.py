"""The gradient rule for Hugging Face models whose experts are on the expert view, with the real DeepSpeed engine."""

from __future__ import annotations

import gradient_rule as rule
import tensor_parallel_rule as dense
import torch
import torch.distributed as dist

from ds_npu.parallel.expert import sharing
from ds_npu.parallel.expert.weights import GroupedProduct


def hold_to_one_process(
    family: str, parallel: dict, moe: dict, stages: tuple[int, ...], more: dict, **changes: object
) -> None:
    """Hold every stage of ZeRO to one process; ``more`` of the section."""
    rule.without_extension()
    dp = dist.get_world_size() // (parallel.get("tensor", 1) * parallel.get("context", 1))
    dtype = torch.float64
    expected = dense.reference(family, dp, dtype=dtype, start=dtype, **changes)
    for stage in stages:
        errors = dense.engine_step(family, stage, dtype, {"parallel": parallel, "moe": moe} | more, expected, **changes)
        where = (family, parallel, moe, more, stage, errors)
        assert errors.loss <= dense.EXACT and errors.gradient <= dense.EXACT, where
        loose = dense.EXACT if stage == 0 else dense.SINGLE
        assert errors.norm <= loose and errors.weight <= loose, where


def sinks_take_products(family: str, moe: dict) -> None:
    """Weight gradients of experts, added where the optimizer accumulates, are those of one process."""
    taken: list[str] = []
    original = GroupedProduct.add_to

    def add_to(product: GroupedProduct, buffer: torch.Tensor) -> bool:
        taken.append(str(buffer.dtype))
        return original(product, buffer)

    GroupedProduct.add_to = add_to  # type: ignore[method-assign]
    more = {"fused_ops": {"matmul_accumulate": True}}
    hold_to_one_process(family, {"expert": 2}, moe, (0, 1), more)
    # From the second micro-batch of a step on: the first one's gradients become the buffers.
    layers = {"mixtral": 2, "qwen3_moe": 1}[family]
    assert taken == ["torch.float64"] * (2 * layers * (rule.ACCUMULATION - 1) * 2), len(taken)


def replicas_are_made(family: str, parallel: dict) -> None:
    """With and without the optimizer's buffers; every rank computes the same number of rows, but for one."""
    seen: list[list[int]] = []
    original = sharing.shared_rows

    def shared_rows(pairs_RE: sharing.Pairs, ranks: int, least: int) -> sharing.SharedRows:
        plan = original(pairs_RE, ranks, least)
        if plan.spare:
            seen.append([sum(rows for each in plan.rows for at, rows in each if at == rank) for rank in range(ranks)])
        return plan

    sharing.shared_rows = shared_rows
    moe = {"replica_rows": 1}
    hold_to_one_process(family, parallel, moe, (0, 1), {"fused_ops": {"matmul_accumulate": True}})
    hold_to_one_process(family, parallel, moe, (2, 3), {})
    assert seen and all(max(rows) - min(rows) <= 1 for rows in seen), seen
