"""The probe of ``ds_npu.parallel``: does a sharded model compute what it computes whole? Tried on copies at start.

A weight's shape does not tell what its role claims (which outputs are which head's). So a copy of each kind of block
computes forward and backward on a few random hidden states: once whole, and once sharded over the tensor ranks, which
are threads of this process. Weights are random (``part_copy``): whether a sharding is right depends on how modules use
their weights' shapes, not on the values. The model is not changed, and no device and no communicator is used.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ds_npu.comm.threads import ThreadGroup, run_in_threads
from ds_npu.config.roles import ORDER, Role
from ds_npu.features.modules.part_copy import LARGE, ModelPart, Unit, decoder_unit
from ds_npu.features.modules.scaled_inputs import takes_scaled_inputs
from ds_npu.features.modules.thread_ranks import (
    ProbeResult,
    ThreadTopology,
    first_tensor,
    message_of,
    nothing_drawn,
)
from ds_npu.features.tensor_parallel.regions import SHARDED_IN_REGIONS, SHARDED_ROLES
from ds_npu.features.tensor_parallel.sharded_model import shard_model
from ds_npu.log import logger
from ds_npu.models import kinds, names
from ds_npu.models.hugging_face_model import FLOAT32_TOLERANCE
from ds_npu.models.plan import SUBLAYERS, ModelPlan
from ds_npu.parallel.runtime.placement import sharding_of
from ds_npu.parallel.tensor.axis import SEQUENCE_DIM
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.topology.topology import Topology

MISMATCH = """\
ds_npu.parallel.tensor: found {size}; sharded over so many ranks, {model} does not compute what it does whole:
{faults}
What to do: give these modules, in ds_npu.plan, roles that say in which order their weights hold what they hold; where
none does, give the module around them the role replicated. (Found with random weights; ds_npu.parallel.probe false
turns this check off.)"""
OWN = "ds_npu."
"""The prefix of errors in which a forward refuses what a key of the section asks for."""
FLOOR = 0.1
"""A gradient below this fraction of the largest one is compared as if it had this size."""
SAMPLES = 2
LENGTH = 5
"""The fewest tokens of each sample; with sequence parallelism the ranks do not divide their number."""


@dataclass
class RankResult:
    """The results of one rank, forward and backward."""

    output: torch.Tensor
    gradients: dict[str, torch.Tensor]
    """Gradients of the hidden states (under "") and of the weights, by name."""
    regions: list[tuple[str, torch.Tensor]]
    """Names and outputs of blocks and sublayers, in the order in which they ended."""
    shardings: dict[str, Sharding | None]


def check_sharding(model: nn.Module, plan: ModelPlan, topology: Topology, sequence_parallel: bool) -> None:
    """Raise the same ValueError on all tensor ranks if ``model``, sharded by ``plan``, computes otherwise than whole.

    Every tensor rank calls it at the same time. One line in the log tells what could not be tried.
    """
    size, group = topology.size("tp"), topology.group("tp")
    if sequence_parallel and topology.size("ep", "etp") > 1 and has_scaled_inputs(model, plan):
        # Such blocks keep their sequences by the forward that ds_npu.moe gives them, which copies do not have.
        sequence_parallel = False
    mine = probe(model, plan, size, sequence_parallel)
    found: list[tuple[list[str], list[str]]] = [([], [])] * size
    dist.all_gather_object(found, (mine.faults, mine.unseen), group=group)
    faults: list[str] = next((faults for faults, _ in found if faults), [])
    unseen = list(dict.fromkeys(each for _, rank in found for each in rank))
    for refusal in (fault for fault in faults if fault.startswith(OWN)):
        raise ValueError(refusal)
    if faults:
        raise ValueError(MISMATCH.format(size=size, model=plan.model, faults="\n".join(faults)))
    if unseen and topology.global_rank == 0:
        logger().info("parallel.probe: not tried, so that the plan is trusted: %s", "; ".join(unseen))


def has_scaled_inputs(model: nn.Module, plan: ModelPlan) -> bool:
    """Whether a block of ``model`` passes every token to every expert, and so flattens its hidden states."""
    known: dict[Hashable, bool] = {}
    return any(takes_scaled_inputs(model, name, known) for name in plan.named(Role.EXPERTS))


class _UnshardableError(Exception):
    """The copy cannot be sharded; ``shard_model`` will say so for the model itself."""


def probe(model: nn.Module, plan: ModelPlan, size: int, sequence_parallel: bool, large: int = LARGE) -> ProbeResult:
    """Compare one block of each kind, computed by ``size`` tensor ranks, with the same block computed whole.

    Weights of more than ``large`` numbers take hardly any memory, and their gradients are not compared.
    """
    found = ProbeResult()
    blocks = _one_of_each_kind(model, plan)
    decoder = decoder_unit(model, plan, tuple(blocks), large)
    if decoder is not None and _compared(decoder, size, sequence_parallel, found):
        blocks = []
    for block in blocks:
        if decoder is None and _compared(_alone(model, plan, block, large), size, sequence_parallel, found):
            continue
        for sublayer in _sublayers(plan, block):
            _compared(_alone(model, plan, sublayer, large), size, False, found)
    for sublayer in _sublayers(plan, ""):
        if plan.block(sublayer) is None:
            _compared(_alone(model, plan, sublayer, large), size, False, found)
    loose = [name for name in plan.named(*SHARDED_IN_REGIONS) if plan.around(name, Role.BLOCK, *SUBLAYERS) is None]
    if loose:
        found.unseen.append(f"{', '.join(map(names.generic, loose))}: in no block, attention or mlp")
    return found


def _one_of_each_kind(model: nn.Module, plan: ModelPlan) -> list[str]:
    """The first sharded block of each kind; blocks of one kind have the same modules, sizes and roles."""
    kinds_seen: dict[tuple[Hashable, ...], str] = {}
    for block in plan.blocks:
        inside = plan.inside(block)
        if any(plan.roles[name] in SHARDED_ROLES for name in inside):
            kind = tuple(_trait(model, plan, block, name) for name in inside)
            kinds_seen.setdefault(kind, block)
    return list(kinds_seen.values())


def _trait(model: nn.Module, plan: ModelPlan, block: str, name: str) -> Hashable:
    module = model.get_submodule(name)
    sizes = tuple(kinds.own_shapes(module).items())
    return name.removeprefix(block), type(module), plan.roles[name], plan.attentions.get(name), sizes


def _alone(model: nn.Module, plan: ModelPlan, name: str, large: int) -> Unit:
    # Hidden states are as wide as the input of the first norm or projection.
    first = next(module for module in map(model.get_submodule, plan.inside(name)) if kinds.own_shapes(module))
    width = kinds.sizes(first)[0] if kinds.is_linear(first) else next(iter(kinds.own_shapes(first).values()))[-1]
    return Unit(ModelPart(model, plan, name, (name,) if name in plan.blocks else (), large), width)


def _sublayers(plan: ModelPlan, name: str) -> list[str]:
    """The outermost sublayers in ``name``."""
    return [each for each in plan.inside(name, *SUBLAYERS) if plan.sublayer(each) is None]


def _compared(unit: Unit, size: int, sequence_parallel: bool, found: ProbeResult) -> bool:
    """Compare ``unit`` whole and sharded, and add the findings to ``found``.

    False where it cannot be computed whole.
    """
    length = max(LENGTH, size + 1)
    x_BSH = torch.randn(
        SAMPLES, length, unit.width, generator=torch.Generator().manual_seed(2), dtype=torch.float64, device="cpu"
    )
    where = names.generic(unit.part.name) or unit.part.plan.model
    try:
        with nothing_drawn():
            (whole,) = run_in_threads(1, partial(_computed, unit, x_BSH, None))
        if not whole.output.isfinite().all():
            raise ArithmeticError("its results are not finite with random weights")
    except Exception as error:  # A user's code, called with arguments that it may not be made for.
        found.unseen.append(f"{where}: {message_of(error)}")
        return False
    try:
        sharded = run_in_threads(size, partial(_computed, unit, x_BSH, sequence_parallel))
    except _UnshardableError:
        return True
    except Exception as error:
        blocks = unit.part.blocks or (unit.part.name,)
        refusal = isinstance(error, ValueError) and str(error).startswith(OWN)
        found.faults.append(str(error) if refusal else _fault(unit, blocks, f"cannot be computed: {message_of(error)}"))
        return True
    found.faults.extend(_differences(unit, whole, sharded))
    return True


def _computed(unit: Unit, x_BSH: torch.Tensor, sequence_parallel: bool | None, group: ThreadGroup) -> RankResult:
    """Forward and backward of a copy of ``unit``: whole where ``sequence_parallel`` is None, else this rank's shard."""
    model = unit.part.copied()
    if sequence_parallel is not None:
        try:
            shard_model(model, unit.part.own_plan, ThreadTopology(group), sequence_parallel)
        except ValueError as error:
            raise _UnshardableError from error
    regions = _recorded(model, unit.part.own_plan)
    x_BSH = x_BSH.clone().requires_grad_()
    output = unit.call(model, x_BSH)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=output.dtype)
    torch.autograd.backward(output, upstream)
    weights = dict(model.named_parameters())
    return RankResult(
        output.detach(),
        {name: each.grad for name, each in {"": x_BSH, **weights}.items() if each.grad is not None},
        regions,
        {name: sharding_of(each) for name, each in weights.items()},
    )


def _recorded(model: nn.Module, plan: ModelPlan) -> list[tuple[str, torch.Tensor]]:
    """A list to which hooks append what blocks and sublayers of ``model`` return."""
    regions: list[tuple[str, torch.Tensor]] = []

    def keep(name: str, module: nn.Module, args: object, out: object) -> None:
        regions.append((name, first_tensor(out).detach()))

    for name in plan.named(Role.BLOCK, *SUBLAYERS):
        model.get_submodule(name).register_forward_hook(partial(keep, name))
    return regions


def _differences(unit: Unit, whole: RankResult, sharded: list[RankResult]) -> Iterator[str]:
    """The first difference, in the order of computation: later ones follow from it."""
    for index, (name, expected) in enumerate(whole.regions):
        gap = _gap([rank.regions[index][1] for rank in sharded], expected)
        if gap > FLOAT32_TOLERANCE:
            yield _fault(unit, [name], f"its output differs by {gap:.1g} of its largest value")
            return
    everything = unit.part.blocks or (unit.part.name,)
    gap = _gap([rank.output for rank in sharded], whole.output)
    if gap > FLOAT32_TOLERANCE:
        yield _fault(unit, everything, f"their output differs by {gap:.1g} of its largest value")
        return
    # The gradient of a key's bias, and of a router with equal experts, is 0: what is computed is rounding.
    floor = FLOOR * max(float(each.abs().max()) for each in whole.gradients.values())
    gaps = {name: _gradient_gap(name, expected, sharded, floor) for name, expected in whole.gradients.items()}
    wrong = [name for name, gap in gaps.items() if gap > FLOAT32_TOLERANCE]
    if wrong:
        of = ", ".join(names.generic(name) or "the hidden states" for name in wrong[:4])
        regions = dict.fromkeys(unit.part.plan.sublayer(names.parent(name)) for name in wrong if name)
        yield _fault(unit, [each for each in regions if each] or everything, f"the gradient of {of} differs")


def _gradient_gap(name: str, expected: torch.Tensor, sharded: list[RankResult], floor: float) -> float:
    found = [rank.gradients[name] for rank in sharded if name in rank.gradients]
    if len(found) < len(sharded):
        return math.inf
    sharding = sharded[0].shardings.get(name)
    return _gap([sharding.assemble(found)] if sharding else found, expected, floor)


def _gap(found: list[torch.Tensor], expected: torch.Tensor, floor: float = 0.0) -> float:
    """The largest difference of the ranks' results, whole or as sequence shards, from ``expected``.

    Relative to the largest value of ``expected``, or to ``floor`` where that is larger.
    """
    if expected.dim() == 3 and found[0].shape != expected.shape:
        found = [torch.cat(found, dim=SEQUENCE_DIM)[:, : expected.shape[SEQUENCE_DIM]]]
    if any(each.shape != expected.shape for each in found):
        return math.inf
    largest = max(float(expected.abs().max()), floor)
    return max(float((each - expected).abs().max()) for each in found) / (largest or 1.0)


def _fault(unit: Unit, where: Iterable[str], what: str) -> str:
    """A text that says ``what`` is wrong in ``where``, and which of its roles may be wrong."""
    model, plan = unit.part.model, unit.part.plan
    lines = [f"  {', '.join(names.generic(name) for name in where)}: {what}"]
    for name in (inner for each in where for inner in plan.inside(each)):
        role = plan.roles[name]
        is_whole = role is Role.REPLICATED and plan.of(names.parent(name)) is not role
        if role in SHARDED_ROLES or is_whole:
            meaning = f", which means {ORDER[role]}" if role in ORDER else ""
            lines.append(f"    {names.generic(name)} ({kinds.described(model.get_submodule(name))}): {role}{meaning}")
    return "\n".join(dict.fromkeys(lines))
