"""A call of a module from a file, computed again in one process, as it was recorded and in other dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_npu.features.recorded_calls.plain_data import Plain, RebuildError, made_of, rebuilt, unknown_in
from ds_npu.features.recorded_calls.tensor_statistics import is_float, named_leaves, statistics_in
from ds_npu.log import aligned

OPERATOR, MODULE = "operator", "module"
DTYPES: tuple[torch.dtype | None, ...] = (None, torch.float32, torch.float64)
"""The recorded dtypes, and those to compare with."""
NAMESPACES = ("aten",)
"""Namespaces of operators that a file may name."""


@dataclass(frozen=True)
class ReplayedCall:
    """One computation of the operator or of the module."""

    of: str
    dtype: str
    is_finite: bool
    figures: Mapping[str, str]
    """The figures of each result, by its name."""
    difference: float | None
    """The largest difference from the recorded results where both are finite, as a share of the largest recorded one.

    None where they were computed in other dtypes; NaN where other values are not finite.
    """

    @property
    def comes_again(self) -> str:
        if self.difference is None:
            return ""
        if self.difference == 0:
            return "the recorded values, to the bit"
        return f"other values, by up to {self.difference:.1g} of the largest" if self.difference > 0 else OTHERS


OTHERS = "others than recorded are not finite"


def replayed(data: Plain) -> tuple[list[ReplayedCall], list[str]]:
    """The computations of what a file of ``watch.finite`` holds, and what cannot be computed, with the reason."""
    found: list[ReplayedCall] = []
    refused: list[str] = []
    for name, computes in ((OPERATOR, _operator), (MODULE, _module)):
        try:
            found += [computes(data, dtype) for dtype in DTYPES]
        except RebuildError as error:
            refused.append(f"the {name} cannot be computed again: {error}")
    return found, refused


def _operator(data: Plain, dtype: torch.dtype | None) -> ReplayedCall:
    call = data["operator"]
    if call is None:
        raise RebuildError("none made it: a weight or an argument was not finite itself")
    if unknown := unknown_in(call):
        raise RebuildError(f"the file does not hold {', '.join(unknown)}")
    function = _overload(call["operator"])
    args, kwargs = (_cast(made_of(call[part]), dtype) for part in ("args", "kwargs"))
    result = _reached(call["operator"], lambda: function(*args, **kwargs))
    return _replay(OPERATOR, dtype, result, call["result"])


def _overload(path: str) -> Any:
    namespace, _, rest = path.partition(".")
    if namespace not in NAMESPACES:
        raise RebuildError(f"{path} is no operator of {' or '.join(NAMESPACES)}")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None or overload not in packet.overloads():
        raise RebuildError(f"this torch {torch.__version__} has no {path}")
    return getattr(packet, overload)


def _module(data: Plain, dtype: torch.dtype | None) -> ReplayedCall:
    if "module" not in data:
        raise RebuildError("the file holds an operator alone")
    if unknown := unknown_in(data["arguments"]):
        raise RebuildError(f"the file does not hold its arguments {', '.join(unknown)}")
    if data["module"]["weights"] and not data["weights"]:
        raise RebuildError("the file does not hold its weights")
    module = rebuilt(data["module"], _cast(data["weights"], dtype))
    given = _cast(made_of(data["arguments"]), dtype)
    torch.random.set_rng_state(data["random"][0])
    autocast = data["autocast"] if dtype is None else None
    with torch.autocast("cpu", autocast) if autocast else nullcontext():
        if not data["backward"]:
            with torch.no_grad():
                output = _reached(data["name"], lambda: module(*given["args"], **given["kwargs"]))
            return _replay(MODULE, dtype, {"output": output}, {"output": data["output"]})
        found = _gradients(data, module, given)
        recorded = data["given_gradients"]
        both = [name for name in found if name in recorded]
        same = {name: recorded[name] for name in both}
        return _replay(MODULE, dtype, found, same, {name: found[name] for name in both})


def _gradients(data: Plain, module: nn.Module, given: Any) -> dict[str, torch.Tensor]:
    """The gradients of arguments and weights."""
    inputs = {f"gradient of {name}": each for name, each in named_leaves({**given["kwargs"], "args": given["args"]})}
    needed = {f"gradient of {path.removeprefix('kwargs.')}" for path in data["needs_gradients"]}
    wanted = {name: each.requires_grad_() for name, each in inputs.items() if name in needed}
    wanted |= {f"gradient of weight {name}": each for name, each in module.named_parameters()}
    output = _reached(data["name"], lambda: module(*given["args"], **given["kwargs"]))
    gradients = data["gradients"]
    leaves = {path: leaf for path, leaf in named_leaves(output, "output") if path in gradients and leaf.requires_grad}
    if not leaves:
        raise RebuildError("its outputs have no gradients in the file")
    found = torch.autograd.grad(
        list(leaves.values()),
        list(wanted.values()),
        [gradients[path].to(leaf.dtype) for path, leaf in leaves.items()],
        allow_unused=True,
    )
    return {name: each for name, each in zip(wanted, found, strict=True) if each is not None}


def _reached(name: str, compute: Callable[[], Any]) -> Any:
    """The result of ``compute``. Raises RebuildError with its error: what the module needs is not in the file."""
    try:
        return compute()
    except Exception as error:
        raise RebuildError(f"{name} raised {type(error).__name__}: {error}") from error


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor.clone()

    return tree_map_only(torch.Tensor, cast, tree)


def _replay(of: str, dtype: torch.dtype | None, result: Any, recorded: Any, compared: Any = None) -> ReplayedCall:
    """The call that gave ``result``; ``compared``: what of it to compare with ``recorded``, if not all."""
    figures = statistics_in({"result": result} if isinstance(result, torch.Tensor) else result)
    leaves = [leaf for leaf in tree_leaves(result) if is_float(leaf)]
    dtypes = sorted({str(leaf.dtype).removeprefix("torch.") for leaf in leaves})
    return ReplayedCall(
        of,
        "as recorded" + (f" ({', '.join(dtypes)})" if dtypes else "") if dtype is None else str(dtype)[6:],
        not any(each.kinds for each in figures.values()),
        {name: str(each) for name, each in figures.items()},
        None
        if dtype is not None or recorded is None
        else _difference(result if compared is None else compared, recorded),
    )


def _difference(result: Any, recorded: Any) -> float:
    leaves = [leaf for leaf in tree_leaves(result) if is_float(leaf)]
    expected = [leaf for leaf in tree_leaves(recorded) if is_float(leaf)]
    worst = 0.0
    if len(expected) != len(leaves):
        return torch.nan
    for found, wanted in zip(leaves, expected, strict=True):
        is_finite = wanted.isfinite()
        if found.shape != wanted.shape or not torch.equal(is_finite, found.isfinite()):
            return torch.nan
        if is_finite.any():
            there = wanted[is_finite].double()
            apart = (found[is_finite].double() - there).abs().max()
            worst = max(worst, (apart / there.abs().max().clamp(min=1e-300)).item())
    return worst


def replay_lines(data: Plain) -> Iterator[str]:
    """The lines for people."""
    direction = "backward" if data["backward"] else "forward"
    yield f"step {data['step']}, rank {data['rank']}, {direction} of micro-batch {data['micro_batch']}: {data['name']}"
    yield f"recorded: {data['found']}"
    for title, figures in (("in", data["came"]), ("out", data["went"])):
        yield from (f"  {title}: {name}: {figure}" for name, figure in figures.items())
    for each in data["left_out"]:
        yield f"  not in the file: {each}"
    found, refused = replayed(data)
    rows = [(each.of, each.dtype, "finite" if each.is_finite else "not finite", each.comes_again) for each in found]
    yield from aligned([("computed again", "dtype", "result", ""), *rows])
    yield from refused
