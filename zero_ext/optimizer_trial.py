"""Whether an optimizer gives, for weights that are sharded, the numbers that it gives for whole ones: it is tried.

AdamW, SGD and Lion step each element by itself. Muon, Adafactor, Lamb, LARS, Shampoo and SOAP read whole matrices or
their norms, Prodigy reads all weights of its rank: with a part of these on each rank they compute something else, and
nothing says so. A second optimizer of the same class and settings therefore steps small tensors, whole in one process
and cut as on two ranks.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.topology.degrees import NAMES, Axis
from ds_npu.zero_ext.matrix_optimizer import MatrixOptimizer

STEPS = 3
RATE = 1e-3
"""Learning rate of the trial where a group has 0 and none to begin with."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative difference up to which two results are one: kernels round by the length of a loop."""
BLOCKS_TOLERANCE = 0.05
"""The same for tensors that are large enough for 8-bit moments, which a part quantises in other blocks."""
EXPERTS = 8
"""Length of the dims before the last two."""
APART = -1
"""In place of a dim: the ranks have different weights, each of them whole."""
FLAT = -2
"""In place of a dim: the ranks have parts of one flat tensor, as ZeRO cuts it."""
HOST = torch.device("cpu")
BY_ELEMENT = ("DeepSpeedCPUAdam", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad", "FusedAdam", "FusedLion")
"""Compiled optimizers of DeepSpeed that step each element by itself; a second one prints, and holds state in C++."""
PLAIN = (bool, int, float, str, torch.dtype, type(None))
"""Types of settings that a second optimizer may be given, too; other objects (an engine) its steps would change."""
OWN = "use_muon"
"""The setting of a group for which DeepSpeed's ZeRO 1 to 3 put whole matrices together by themselves."""


@dataclass(frozen=True)
class Sample:
    """Tensors on which an optimizer is tried."""

    size: int
    """Length of their last two dims; halves of it are what two ranks have."""
    tolerance: Mapping[torch.dtype, float]

    def draw(self, dims: int, drawn: torch.Generator) -> torch.Tensor:
        shape = [EXPERTS] * (dims - 2) + [self.size] * min(dims, 2)
        whole = torch.randn(shape, generator=drawn, dtype=torch.float64)
        # The halves have different norms, in each tensor others; to an outer product, factored moments would be exact.
        scales = 8.0 ** torch.rand([2] * dims, generator=drawn, dtype=torch.float64)
        for dim, length in enumerate(shape):
            scales = scales.repeat_interleave(length // 2, dim)
        return whole * scales


SMALL, LARGE = Sample(8, TOLERANCE), Sample(128, dict.fromkeys(TOLERANCE, BLOCKS_TOLERANCE))
"""Some optimizers read whole weights only where they are large."""


class NotRepeatableError(RuntimeError):
    """No second optimizer of the same class and settings can be made and stepped, or its steps are random."""


@dataclass(frozen=True)
class Cut:
    """How weights of one parameter group lie on the ranks of an axis."""

    axis: Axis
    dims: int
    """Number of dims of the weights in the plain model."""
    dim: int
    """The dim of which each rank has a part, or APART, or FLAT."""


def _cuts_of_group(group: Mapping[str, Any], sizes: Mapping[Axis, int]) -> dict[Cut, list[str]]:
    """The cuts of a group's weights by axes of ``sizes`` ranks, each with their names; data axes cut nothing."""
    names: dict[Cut, list[str]] = {}
    for weight in group["params"]:
        for cut in _cuts_of_weight(weight, sizes):
            names.setdefault(cut, []).append(placement_of(weight).name)
    return names


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _cuts_of_weight(weight: nn.Parameter, sizes: Mapping[Axis, int]) -> Iterator[Cut]:
    placement = placement_of(weight)
    dims = len(placement.shape)
    for axis, sharding in placement.sharded.items():
        if sizes.get(axis, 1) > 1:
            is_whole = all(sharding.length(rank) in (0, sharding.size) for rank in range(len(sharding.ranges)))
            yield Cut(axis, dims, APART if is_whole else sharding.dim)
    for axis in placement.absent:
        if sizes.get(axis, 1) > 1:
            yield Cut(axis, dims, APART)


def difference_in_parts(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], dims: int, dim: int) -> float:
    """The relative difference between weights that were stepped whole and in two parts; 0 within the tolerance.

    ``settings``: of the parameter group. ``dims``, ``dim``: as in ``Cut``. ``optimizer`` and the random numbers of this
    process do not change. Raises NotRepeatableError.
    """
    own = next((each.device for group in optimizer.param_groups for each in group["params"]), HOST)
    errors = []
    # Kernels of a device do not take tensors of the host.
    for dtype, device in dict.fromkeys([(torch.float64, HOST), (torch.float32, HOST), (torch.float32, own)]):
        try:
            found = _difference(optimizer, settings, Cut("tp", dims, dim), {"dtype": dtype, "device": device})
            if not found and (unknown := _given(optimizer)[1]):
                raise NotRepeatableError(f"what it was given as {', '.join(unknown)} is not known")
            return found
        except NotRepeatableError:
            raise
        except Exception as error:  # Foreign code, of which anything may be raised.
            errors.append(f"{type(error).__name__}: {error}")
    raise NotRepeatableError(errors[-1])


def _difference(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], cut: Cut, kind: Mapping[str, Any]
) -> float:
    samples = (SMALL,) if cut.dim == APART else (SMALL, LARGE)
    return next(filter(None, (_difference_on(each, optimizer, settings, cut, kind) for each in samples)), 0.0)


def _difference_on(
    sample: Sample, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], cut: Cut, kind: Mapping[str, Any]
) -> float:
    drawn = torch.Generator().manual_seed(0)
    weights, *gradients = [[sample.draw(cut.dims, drawn).to(**kind) for _ in range(2)] for _ in range(1 + STEPS)]
    whole = _stepped(optimizer, settings, weights, gradients)
    again = _stepped(optimizer, settings, weights, gradients, seed=1)
    if not all(map(torch.equal, whole, again)):
        raise NotRepeatableError("two runs from the same weights and gradients gave different results")
    ranks = []
    for rank in range(2):
        own = [_part(each, cut.dim, rank) for each in (weights, *gradients)]
        ranks.append(_stepped(optimizer, settings, own[0], own[1:]))
    expected = _joined([_part(whole, cut.dim, rank) for rank in range(2)])
    found = _joined(ranks)
    moved = (expected - _joined([_part(weights, cut.dim, rank) for rank in range(2)])).norm()
    if not moved:
        raise NotRepeatableError("its steps changed no weight")
    error = float((found - expected).norm() / moved)
    return error if not error <= sample.tolerance[kind["dtype"]] else 0.0


def _part(tensors: Sequence[torch.Tensor], dim: int, rank: int) -> list[torch.Tensor]:
    if dim == APART:
        return [tensors[rank]]
    if dim == FLAT:
        return [torch.cat([each.flatten() for each in tensors]).chunk(2)[rank]]
    return [each.chunk(2, dim)[rank].contiguous() for each in tensors]


def _joined(ranks: Iterable[Iterable[torch.Tensor]]) -> torch.Tensor:
    return torch.cat([each.flatten().double().cpu() for rank in ranks for each in rank])


def _stepped(
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    weights: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
    seed: int = 0,
) -> list[torch.Tensor]:
    held = [nn.Parameter(each.clone()) for each in weights]
    devices = [each.device for each in held[:1] if each.device.type != "cpu"]
    with (
        torch.random.fork_rng(devices, device_type=held[0].device.type if devices else "cuda"),
        torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        second = _second(optimizer, settings, held)
        for step in gradients:
            for weight, gradient in zip(held, step, strict=True):
                weight.grad = gradient.clone()
            second.step()
    return [each.detach() for each in held]


def _second(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], weights: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Another optimizer of the same class, for ``weights``; raises NotRepeatableError for unknown settings."""
    moving = dict(settings)
    if settings.get("lr") == 0:
        # Schedulers that warm up begin with 0, which would change no weight.
        moving["lr"] = float(settings.get("initial_lr") or RATE)
    second = type(optimizer)([{**moving, "params": weights}], **_given(optimizer)[0])
    train = getattr(second, "train", None)  # Schedule-free optimizers have it.
    if callable(train):
        train()
    return second


def _given(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[str]]:
    """The arguments of the constructor of ``optimizer``, and settings with a default whose values are not known.

    Raises NotRepeatableError where nothing can be given in the place of what is not known.
    """
    kind = type(optimizer)
    given: dict[str, Any] = {}
    unknown = []
    for name, each in list(inspect.signature(kind).parameters.items())[1:]:
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        own = getattr(optimizer, name, inspect.Parameter.empty)
        if any(isinstance(leaf, nn.Parameter) for leaf in tree_leaves(own)):
            raise NotRepeatableError(f"{kind.__name__} was given weights as {name}")
        if name in optimizer.defaults:
            given[name] = optimizer.defaults[name]
        elif all(isinstance(leaf, PLAIN) for leaf in tree_leaves(own)):
            given[name] = own
        elif each.default is not each.empty:
            unknown.append(name)
        elif own is not each.empty:
            given[name] = own
        else:
            raise NotRepeatableError(f"what {kind.__name__} was given as {name} is not known")
    return given, unknown


@dataclass(frozen=True)
class Verdict:
    """The result of an optimizer's trial for this rank's weights."""

    refusal: str | None = None
    """Why it is not exact over the axes of this layout."""
    warning: str | None = None
    """A warning about an optimizer that could not be tried, or that DeepSpeed's own ZeRO changes."""


def tried(optimizer: torch.optim.Optimizer, sizes: Mapping[Axis, int], zero_stage: int) -> Verdict:
    """Try ``optimizer`` on small tensors, cut as its weights are over axes of ``sizes`` ranks.

    Takes a tenth of a second for each cut.
    """
    if isinstance(optimizer, MatrixOptimizer):
        # Its matrices are whole; the other weights have an optimizer of their own, or an Adam in its code.
        other = optimizer.inner.aux_optimizer
        return Verdict() if other is None else tried(other, sizes, zero_stage)
    kind, unknown = type(optimizer).__name__, None
    if kind in BY_ELEMENT and type(optimizer).__module__.startswith("deepspeed."):
        return Verdict()
    for group in optimizer.param_groups:
        for cut, names in _cuts_of_group(group, sizes).items():
            try:
                error = difference_in_parts(optimizer, _settings_of(group), cut.dims, cut.dim)
            except NotRepeatableError as reason:
                unknown = (
                    f"{kind} could not be tried on small tensors ({reason}), so nothing shows whether it gives the "
                    f"same numbers for shards ({_key(cut)}) as for whole weights. Compare losses with a run without"
                )
                continue
            if error:
                return Verdict(_refusal(kind, cut, names, error))
    if unknown is None and zero_stage and _differs_when_flat(optimizer):
        unknown = (
            f"{kind} reads whole weights, and DeepSpeed's ZeRO {zero_stage} gives it parts of flat ones: losses differ "
            "from those of one process, with or without ds_npu. zero_optimization.stage 0 gives it whole weights"
        )
    return Verdict(None, unknown)


def _refusal(kind: str, cut: Cut, names: Sequence[str], error: float) -> str:
    what = "different weights" if cut.dim == APART else f"parts along dim {cut.dim}"
    return (
        f"{_key(cut)}: its ranks have {what} of {len(names)} weights ({names[0] or 'one without a name'}, ...), and "
        f"the optimizer {kind} gives other numbers for parts than for the whole: in a trial of {STEPS} steps of small "
        f"tensors the steps differ by {error:.2g} of their size. What to do: an optimizer that steps each element by "
        f"itself (AdamW, SGD, Lion), or no {_key(cut)}"
    )


def _key(cut: Cut) -> str:
    return f"ds_npu.parallel.{NAMES[cut.axis].replace(' ', '_')}"


def _differs_when_flat(optimizer: torch.optim.Optimizer) -> bool:
    for group in optimizer.param_groups:
        dims = min(2, max((len(placement_of(each).shape) or 1 for each in group["params"]), default=1))
        with suppress(NotRepeatableError):
            if OWN not in group and difference_in_parts(optimizer, _settings_of(group), dims, FLAT):
                return True
    return False
