"""Matrix products fused with a collective, against float64 over all ranks' matrices."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch_npu
from agreement import agree, numbers
from hccl_ranks import endings
from ranks import run_on_ranks

DTYPES = (torch.bfloat16, torch.float16)
SHAPES = ((8, 16, 4), (32, 100, 24), (64, 7, 33))  # rows, inner, columns


def group_name() -> str:
    """As HCCL knows the world: what the operators are given."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("npu"))
    return backend.get_hccl_comm_name(dist.get_rank())


def matrices(rows: int, columns: int, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What each rank has, in float64."""
    return [numbers(rows, columns, seed=100 * seed + rank, dtype=dtype) for rank in range(dist.get_world_size())]


def total(terms: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(terms).sum(0)


def all_gather_body() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype, (rows, inner, columns), transposed in itertools.product(DTYPES, SHAPES, (False, True)):
        left = matrices(rows, inner, 1, dtype)
        right = numbers(inner, columns, seed=7, dtype=dtype)
        x2 = right.t().contiguous().to(dtype).npu().t() if transposed else right.to(dtype).npu()
        for gather_output in (True, False):
            found, gathered = torch_npu.npu_all_gather_base_mm(
                left[rank].to(dtype).npu(), x2, group_name(), world, gather_output=gather_output
            )
            whole = torch.cat(left)
            agree(found, whole @ right, magnitude=whole.abs() @ right.abs())
            if gather_output:
                agree(gathered, whole, roundings=0)


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_gather_then_product(world_size):
    run_on_ranks(world_size, all_gather_body, backend="hccl")


def reduce_scatter_body() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype, (rows, inner, columns) in itertools.product(DTYPES, SHAPES):
        left, right = matrices(rows, inner, 1, dtype), matrices(inner, columns, 2, dtype)
        found = torch_npu.npu_mm_reduce_scatter_base(
            left[rank].to(dtype).npu(), right[rank].to(dtype).npu(), group_name(), world, reduce_op="sum"
        )
        products = [a @ b for a, b in zip(left, right, strict=True)]
        magnitudes = [a.abs() @ b.abs() for a, b in zip(left, right, strict=True)]
        # Each product is rounded, and so is each partial sum.
        agree(found, total(products).chunk(world)[rank], total(magnitudes).chunk(world)[rank], roundings=2 * world)


@pytest.mark.parametrize("world_size", [2, 4])
def test_product_then_reduce_scatter(world_size):
    run_on_ranks(world_size, reduce_scatter_body, backend="hccl")


def all_reduce_body() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype, (rows, inner, columns), extra in itertools.product(DTYPES, SHAPES, ("none", "bias", "addend")):
        left, right = matrices(rows, inner, 1, dtype), matrices(inner, columns, 2, dtype)
        added = {
            "none": [torch.zeros(1, 1, dtype=torch.float64)] * world,
            "bias": matrices(1, columns, 3, dtype),
            "addend": matrices(rows, columns, 4, dtype),
        }[extra]
        options = {
            "none": {},
            "bias": {"bias": added[rank][0].to(dtype).npu()},
            "addend": {"x3": added[rank].to(dtype).npu()},
        }[extra]
        found = torch_npu.npu_mm_all_reduce_base(
            left[rank].to(dtype).npu(), right[rank].to(dtype).npu(), group_name(), reduce_op="sum", **options
        )
        products = [a @ b + c for a, b, c in zip(left, right, added, strict=True)]
        magnitudes = [a.abs() @ b.abs() + c.abs() for a, b, c in zip(left, right, added, strict=True)]
        agree(found, total(products), total(magnitudes), roundings=2 * world)
    batch = numbers(2, 5, 16, seed=5, dtype=torch.bfloat16)
    weight = numbers(16, 3, seed=6, dtype=torch.bfloat16)
    found = torch_npu.npu_mm_all_reduce_base(batch.bfloat16().npu(), weight.bfloat16().npu(), group_name())
    agree(found, world * (batch @ weight), world * (batch.abs() @ weight.abs()), roundings=2 * world)


@pytest.mark.parametrize("world_size", [2, 4])
def test_product_then_all_reduce(world_size):
    run_on_ranks(world_size, all_reduce_body, backend="hccl")


def order_body() -> None:
    """Fused operators and plain collectives take their turns on one communicator."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x1, x2 = torch.ones(4, 8).bfloat16().npu(), torch.ones(8, 2).bfloat16().npu()
    name = group_name()
    for _ in range(10):
        work = dist.all_reduce(count := torch.ones(3).npu() * (rank + 1), async_op=True)
        found, _ = torch_npu.npu_all_gather_base_mm(x1, x2, name, world)
        work.wait()
        agree(found, torch.full((4 * world, 2), 8.0, dtype=torch.float64))
        agree(count, torch.full((3,), world * (world + 1) / 2, dtype=torch.float64))


def test_fused_operators_and_collectives_keep_the_hosts_order():
    run_on_ranks(2, order_body, backend="hccl")


def float32_body() -> None:
    torch_npu.npu_all_gather_base_mm(torch.ones(4, 8).npu(), torch.ones(8, 2).npu(), group_name(), 2)


def disagreeing_body() -> None:
    x1, x2 = torch.ones(4, 8).bfloat16().npu(), torch.ones(8, 2).bfloat16().npu()
    if dist.get_rank() == 0:
        torch_npu.npu_all_gather_base_mm(x1, x2, group_name(), 2)
    else:
        torch_npu.npu_mm_reduce_scatter_base(x1, x2, group_name(), 2, reduce_op="sum")


def test_types_that_cann_does_not_multiply_here_are_refused():
    for ended in endings(2, float32_body):
        assert "CANN multiplies two fp16 or two bf16 matrices here, not Float and Float" in ended.said


def test_ranks_that_disagree_are_told():
    first, second = endings(2, disagreeing_body)
    assert "call 2 is all_gather(32 x bf16), but rank 1 calls reduce_scatter(sum, 4 x bf16)" in first.said
    assert "call 2 is reduce_scatter(sum, 4 x bf16), but rank 0 calls all_gather(32 x bf16)" in second.said


def unknown_group_body() -> None:
    x1, x2 = torch.ones(4, 8).bfloat16().npu(), torch.ones(8, 2).bfloat16().npu()
    with pytest.raises(RuntimeError, match="has no communicator named nobody"):
        torch_npu.npu_all_gather_base_mm(x1, x2, "nobody", 2)
        torch.npu.synchronize()


def test_a_communicator_that_does_not_exist_is_named():
    run_on_ranks(2, unknown_group_body, backend="hccl")
