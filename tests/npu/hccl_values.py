"""What ranks give to a collective in the tests, and what comes of it, computed without one."""

from __future__ import annotations

import torch
import torch.distributed as dist

REDUCIBLE = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64)
MOVABLE = (*REDUCIBLE, torch.float64, torch.uint8, torch.bool)
REDUCTIONS = {
    dist.ReduceOp.SUM: lambda a, b: a + b,
    dist.ReduceOp.PRODUCT: lambda a, b: a * b,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}
LARGE = 2 * 2**20 + 3  # of fp32: 8 MiB and a little
COUNTS = (1, 7, 64, 1000, 16384, 16385, 50001)


def value(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What ``rank`` gives: any rank can compute it."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    return torch.randint(-100, 100, (count,), generator=generator).to(dtype)


def reduced(values: list[torch.Tensor], op: dist.ReduceOp) -> torch.Tensor:
    """In the ranks' order, each step exact and then rounded to the dtype (or wrapped, for integers)."""
    exact = torch.float64 if values[0].dtype.is_floating_point else torch.int64
    result = values[0]
    for other in values[1:]:
        result = REDUCTIONS[op](result.to(exact), other.to(exact)).to(result.dtype)
    return result


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit by bit."""
    assert found.device.type == "npu"
    assert found.dtype == expected.dtype
    assert torch.equal(found.cpu(), expected), (found.cpu(), expected)


def everyone(count: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """What all ranks of the world give."""
    return [value(rank, count, dtype, seed) for rank in range(dist.get_world_size())]
