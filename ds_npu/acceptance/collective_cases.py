"""The collectives that ds_npu and DeepSpeed's ZeRO use, in every dtype, from one element to more than HCCL's buffer.

Messages repeat the integers from -8 to 8, whose sums over up to 32 ranks are exact in bf16, too. Their number, 17, is
prime: HCCL cuts messages by powers of 2, so a part that arrives at a wrong offset shows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ds_npu.acceptance.case import Case, Scope
from ds_npu.acceptance.operator_cases import LARGE_S, short

KINDS = (
    "all-reduce",
    "all-reduce, largest",
    "all-reduce of reals",
    "all-reduce in pairs",
    "all-gather",
    "reduce-scatter",
    "reduce-scatter of reals",
    "all-to-all",
    "all-to-all, uneven",
    "batched send and receive",
    "send and receive",
    "broadcast",
    "two in flight",
)
OBJECTS = "objects"
FUSED = ("product fused with an all-gather", "product fused with a reduce-scatter")
REAL_PRODUCTS = {
    FUSED[0]: ((4096, 4096, 3584), (1023, 8192, 7168)),
    FUSED[1]: ((8192, 3584, 4096), (8200, 3584, 8192)),
}
"""Rows on a rank, inner dimension and columns: the MLPs of Llama-3 8B and 70B over 4 or 8 tensor ranks."""
MIB = 1 << 20
BUFFER_MIB = 200
"""Buffer of a communicator where HCCL_BUFFSIZE is not set, by CANN's HCCL user guide."""
MOST_RANKS = 32
"""Most ranks over which the sums are exact in bf16."""
SMALL_RANKS = 4
"""Most ranks of the small cases: the simulator starts ranks more slowly than it runs them."""

REDUCED = (torch.float32, torch.bfloat16, torch.float16)
MOVED = (*REDUCED, torch.int64, torch.int32, torch.uint8)
FOR_EACH_RANK = ("all-gather", "reduce-scatter", "all-to-all", "all-to-all, uneven", "two in flight")

TOLERANCE = (
    "What is moved, and sums of small integers, must be equal: no element may differ. A sum of real numbers over n "
    "ranks may be off by n/2 epsilons of the sum of their magnitudes, half an epsilon for each rounding. A fused "
    "product may be off by as much, its epsilon being 2**-13 at least."
)


@dataclass(frozen=True)
class CollectiveCase(Case):
    """A collective on ``count`` elements a rank.

    An all-to-all sends about as many to each rank.
    """

    kind: str = OBJECTS
    dtype: torch.dtype = torch.float32
    count: int = 1
    inner: int = 256
    columns: int = 384
    """Columns of a fused product's matrix; ``count`` is its rows on a rank."""
    buffer_mib: int | None = None
    """HCCL buffer of a communicator that is made for the case; None: the world's own communicator."""


def collective_cases(scope: Scope) -> list[CollectiveCase]:
    """Cases for all NPUs and, where there are more than two, for two; none for one NPU."""
    found = []
    most = min(scope.npus, SMALL_RANKS if scope.small else MOST_RANKS)
    for ranks in sorted({2, most} if scope.npus > 1 else ()):
        for kind in KINDS:
            found += _of_kind(kind, ranks, scope.small, ranks == most)
        found.append(CollectiveCase(f"objects, {ranks} ranks", ranks, kind=OBJECTS))
        if ranks in (2, 4, 8):
            found += [
                CollectiveCase(f"{kind}, {short(dtype)}, {ranks} ranks", ranks, kind=kind, dtype=dtype, count=512)
                for kind in FUSED
                for dtype in (torch.bfloat16, torch.float16)
            ]
            found += [] if scope.small else _real_products(ranks)
    return found


def _of_kind(kind: str, ranks: int, small: bool, whole: bool) -> list[CollectiveCase]:
    dtypes = REDUCED if "reduce" in kind else MOVED
    found = [_case(kind, ranks, dtype, 1003) for dtype in (dtypes[:2] if small else dtypes)]
    found.append(_case(kind, ranks, torch.bfloat16, 1))
    if kind.endswith("of reals"):
        return found
    # Exceed a communicator's buffer: a small buffer first, which takes little time and memory.
    if kind != "all-reduce in pairs":
        found.append(_case(kind, ranks, torch.bfloat16, MIB + 5, buffer_mib=1))
    if whole and not small:
        # Here each rank has a message for each rank, or from each: they have the size in sum.
        parts = ranks if kind in FOR_EACH_RANK else 1
        found += [_case(kind, ranks, torch.bfloat16, size // parts + 1) for size in (MIB, 16 * MIB, 64 * MIB)]
        over = (int(os.environ.get("HCCL_BUFFSIZE") or BUFFER_MIB) + 50) * MIB // 4
        found.append(_case(kind, ranks, torch.float32, over // parts + 3))
    return found


def _real_products(ranks: int) -> list[CollectiveCase]:
    return [
        CollectiveCase(
            f"{kind}, {rows} x {inner} x {columns}, bfloat16, {ranks} ranks",
            ranks,
            LARGE_S,
            kind=kind,
            dtype=torch.bfloat16,
            count=rows,
            inner=inner,
            columns=columns,
        )
        for kind, sizes in REAL_PRODUCTS.items()
        for rows, inner, columns in sizes
    ]


def _case(kind: str, ranks: int, dtype: torch.dtype, count: int, buffer_mib: int | None = None) -> CollectiveCase:
    name = f"{kind}, {count:,} {short(dtype)}, {ranks} ranks"
    name += f", buffer {buffer_mib} MiB" if buffer_mib else ""
    return CollectiveCase(name, ranks, kind=kind, dtype=dtype, count=count, buffer_mib=buffer_mib)
