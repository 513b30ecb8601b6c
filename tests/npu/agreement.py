"""Tensors on an NPU in every layout, and whether they agree with float64 on the CPU.

The tests of this folder need NPUs, simulated (`ds_npu sim -- python -m pytest tests/npu`) or real.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

FLOATING = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in its storage: its dims in the order ``permutation``, every ``step``-th element of the last,
    from element ``offset`` on."""

    permutation: tuple[int, ...]
    step: int
    offset: int


CONTIGUOUS = None


def layouts(rank: int) -> st.SearchStrategy[Layout | None]:
    """Layouts for a tensor of ``rank`` dims; the simplest is contiguous (None)."""
    strided = st.builds(
        Layout, st.permutations(range(rank)).map(tuple), st.sampled_from((1, 2)), st.integers(min_value=0, max_value=3)
    )
    return st.none() | strided


def on_npu(value: torch.Tensor, dtype: torch.dtype, layout: Layout | None = CONTIGUOUS) -> torch.Tensor:
    """``value`` as a tensor of ``dtype`` on the NPU that lies there as ``layout`` says."""
    if layout is None or value.dim() == 0:
        return value.to(dtype).npu()
    permuted = value.permute(layout.permutation)
    shape = permuted.shape
    storage = torch.zeros(layout.offset + permuted.numel() * layout.step, dtype=dtype, device="npu")
    strides = [layout.step * stride for stride in torch.empty(shape).stride()]
    view = storage.as_strided(shape, strides, layout.offset)
    view.copy_(permuted.to(dtype).npu())
    inverse = [layout.permutation.index(dim) for dim in range(value.dim())]
    placed = view.permute(inverse)
    assert placed.shape == value.shape
    return placed


def rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``value`` as ``dtype`` holds it, in float64: what both the NPU and the reference start from."""
    return value.to(dtype).double()


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal numbers of ``shape``, rounded to ``dtype``, in float64 on the CPU."""
    return rounded(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dtype)


def agree(
    found: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor | None = None, roundings: float = 2
) -> None:
    """Assert that ``found`` (NPU, any floating dtype) is ``expected`` (CPU, float64) up to its own dtype's rounding.

    Allowed per element: ``roundings`` times half a unit in the last place of ``magnitude``, which is |expected| unless
    the result is a sum of larger terms (then: the sum of the terms' absolute values). Say why where ``roundings`` is
    not 2.
    """
    assert found.device.type == "npu", found.device
    assert found.shape == expected.shape, (found.shape, expected.shape)
    finfo = torch.finfo(found.dtype)
    scale = (expected if magnitude is None else magnitude).abs().double()
    allowed = roundings * (finfo.eps / 2) * scale + finfo.smallest_normal
    error = (found.cpu().double() - expected.double()).abs()
    same = (error <= allowed) | (found.cpu().double() == expected) | (found.cpu().isnan() & expected.isnan())
    assert bool(same.all()), f"largest error {(error - allowed).max():.3e} beyond what {found.dtype} rounding allows"
