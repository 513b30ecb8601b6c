"""Every operator on one NPU, forward and backward, against its reference in float64 on the CPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.utils import _pytree as pytree

from ds_npu.acceptance.case import Check, Measured
from ds_npu.acceptance.operator_cases import RMS_ROUNDINGS, OperatorCase, operator_cases
from ds_npu.acceptance.rank import Assignment, npu_module, run_cases, timed
from ds_npu.ops.all import OPERATORS
from ds_npu.ops.attention import Mask, Options
from ds_npu.ops.self_check import FLOAT32_UNIT, ROUNDINGS, outcome


def run_operator(case: OperatorCase, job: Assignment) -> Measured:
    """Compare one call, and time it where the run covers large calls."""
    device = torch.device("npu", npu_module().current_device())
    if case.call is None:
        (operator,) = [each for each in OPERATORS if each.name == case.operator]
        return Measured(wrong=operator.check(device) or "")
    function = case.call.function
    args = case.call.args(case.dtype)
    found = outcome(function, _copied(args, device, None))
    expected = outcome(function, _copied(args, torch.device("cpu"), torch.float64))
    if list(found) != list(expected):
        return Measured(wrong=f"it gives {', '.join(found)}, and the reference {', '.join(expected)}")
    checks = [check for name, true in expected.items() for check in comparisons(name, found[name].cpu(), true)]
    on_npu = _copied(args, device, None)
    return Measured(checks, call_s=None if job.scope.small else timed(lambda: outcome(function, on_npu)))


def comparisons(name: str, found: torch.Tensor, true: torch.Tensor) -> Iterator[Check]:
    """Checks of one tensor: its largest and mean square error, or how many integers or booleans differ."""
    if found.shape != true.shape:
        raise ValueError(f"{name} has shape {tuple(found.shape)}, and {tuple(true.shape)} is right")
    if not found.is_floating_point():
        yield Check(f"{name}, elements that differ", int((found != true).sum()), 0)
        return
    unit = max(torch.finfo(found.dtype).eps, FLOAT32_UNIT)
    # A row of attention that sees no key has the lse -inf in both.
    error = torch.where(found == true, 0.0, found.double() - true)
    size = torch.where(true.isinf(), 0.0, true)
    yield Check(f"{name}, largest", float(error.abs().max()), ROUNDINGS * unit * float(size.abs().max()))
    yield Check(f"{name}, mean square", _rms(error), RMS_ROUNDINGS * unit * _rms(size))


def _rms(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x)) / math.sqrt(x.numel())


def _copied(args: tuple[object, ...], device: torch.device, dtype: torch.dtype | None) -> tuple[object, ...]:
    def copied(x: object) -> object:
        if isinstance(x, torch.Tensor):
            wanted = dtype if dtype is not None and x.is_floating_point() else x.dtype
            return x.detach().clone().to(device, wanted).requires_grad_(x.requires_grad)
        if isinstance(x, Options) and x.mask.dense is not None:
            return replace(x, mask=Mask(dense=x.mask.dense.to(device)))
        return x

    found: tuple[object, ...] = pytree.tree_map(copied, args)
    return found


if __name__ == "__main__":
    sys.exit(run_cases(operator_cases, run_operator, distributed=False))
