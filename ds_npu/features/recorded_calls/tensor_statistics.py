"""Figures of one tensor for reports on what is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_npu.models.logits import AbsentLogits
from ds_npu.parallel.tensor.shard_access import local_shard

NAN, INF, MINUS_INF = "nan", "inf", "-inf"


@dataclass(frozen=True)
class TensorStatistics:
    """Shape, dtype, and least, largest and mean of the finite values of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    least: float
    """NaN where no value is finite."""
    largest: float
    mean: float
    wrong_share: float
    """The share of values that are not finite."""
    kinds: tuple[str, ...]
    """The kinds NAN, INF and MINUS_INF that it has."""

    def __str__(self) -> str:
        what = f"{self.dtype} {list(self.shape)}"
        if not self.shape_has_values:
            return f"{what}: empty"
        wrong = f"{100 * self.wrong_share:.3g} % not finite ({', '.join(self.kinds)})" if self.kinds else "all finite"
        if self.wrong_share == 1:
            return f"{what}: {wrong}"
        return f"{what}: min {self.least:.4g}, max {self.largest:.4g}, mean {self.mean:.4g}, {wrong}"

    @property
    def shape_has_values(self) -> bool:
        return 0 not in self.shape


def is_float(leaf: object) -> bool:
    """Whether ``leaf`` is a tensor of floating-point numbers with values."""
    return (
        isinstance(leaf, torch.Tensor)
        and not isinstance(leaf, AbsentLogits)
        and leaf.is_floating_point()
        and leaf.device.type != "meta"
        and leaf.numel() > 0
        and leaf.untyped_storage().nbytes() > 0
    )


def kinds_in(tensor: torch.Tensor) -> tuple[str, ...]:
    """The kinds NAN, INF and MINUS_INF that ``tensor`` has; the host waits for the device."""
    if tensor.isfinite().all():
        return ()
    found = {NAN: tensor.isnan(), INF: tensor == torch.inf, MINUS_INF: tensor == -torch.inf}
    return tuple(kind for kind, where in found.items() if where.any())


def statistics_of(tensor: torch.Tensor) -> TensorStatistics:
    """The figures of ``tensor`` of floating-point numbers, in float64; the host waits for the device."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        values = local_shard(tensor)
        is_finite = values.isfinite()
        finite = values[is_finite].cpu().double()
        has_any = finite.numel() > 0
        return TensorStatistics(
            tuple(values.shape),
            str(values.dtype).removeprefix("torch."),
            finite.min().item() if has_any else torch.nan,
            finite.max().item() if has_any else torch.nan,
            finite.mean().item() if has_any else torch.nan,
            1 - finite.numel() / max(1, values.numel()),
            kinds_in(values),
        )


def named_leaves(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The float tensors in nested mappings, lists and tuples, each with its path: ``output[0]``, ``hidden_states``."""
    if isinstance(value, torch.Tensor):
        if is_float(value):
            yield path, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from named_leaves(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from named_leaves(each, f"{path}[{index}]")


def statistics_in(value: Any, path: str = "") -> dict[str, TensorStatistics]:
    """The figures of each float tensor in nested mappings, lists and tuples, by its path."""
    return {name: statistics_of(tensor) for name, tensor in named_leaves(value, path)}
