"""Experts that are modules of their own in a list, as older models and users' layers hold them: proved, not guessed.

A module with the role ``experts`` holds one ``nn.ModuleList`` (or is one) of equal MLPs and its forward takes (tokens
[T, H], experts [T, K], weights [T, K]). Runs of copies with small random weights (``equivalence``) find what it
computes, which of an MLP's linears is the gate, and its activation: names prove nothing. Parameters keep their names in
the list; those of an expert on another rank have no elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

import torch
from torch import nn
from torch.nn import functional

from ds_npu.features.modules.equivalence import (
    computes_the_same,
    forward_of_copy,
    isolated_on_cpu,
    likeness,
    own_forward,
    random_input,
)
from ds_npu.models import kinds, names
from ds_npu.models.attributes import attributes
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.weights import Activation, ExpertWeights, stacked
from ds_npu.parallel.runtime.marks import Mark
from ds_npu.parallel.tensor.sharding import Sharding, shard_sections
from ds_npu.topology.degrees import Axis

TOKENS, CHOSEN, K, N = 7, 2, 6, 10
"""Tokens, experts of each token, inputs and columns of the copies that are compared."""
FORWARD = "whose forward takes tokens [T, H], their experts [T, K] and their routing weights [T, K]"
LISTED_LAYOUT: Mark[ListedLayout] = Mark("listed experts")
"""The layout by which a module computes the experts in its list."""
KNOWN: tuple[Activation, ...] = (
    functional.silu,
    functional.gelu,
    partial(functional.gelu, approximate="tanh"),
    functional.relu,
)
"""Activations that an MLP may call without holding them."""


@dataclass(frozen=True)
class Mlp:
    """The names of one expert's linears, and the activation between them."""

    ups: tuple[str, ...]
    """The linears that take tokens: gate and up projection, one for both, or one without a gate."""
    down: str
    activation: Activation
    """The function of the concatenated outputs of all ``ups``."""
    has_gate: bool


@dataclass(frozen=True)
class ListedLayout:
    """How a list of modules holds the experts of one layer."""

    count: int
    width: int
    """I, the columns of each expert."""
    hidden: int
    prefix: str
    """The prefix of the experts' names in the module."""
    mlp: Mlp
    has_bias: bool
    sinks: tuple[str, ...] = ()
    """Parameters whose gradients the optimizer's buffers may accumulate: none, as stacked weights are no parameters."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        leaves = ("weight", "bias") if self.has_bias else ("weight",)
        linears = (*self.mlp.ups, self.mlp.down)
        return tuple(
            f"{self.prefix}{index}.{linear}.{leaf}"
            for index, linear, leaf in itertools.product(range(self.count), linears, leaves)
        )

    def shardings(self, name: str, ep: int, etp: int) -> dict[Axis, Sharding]:
        """The shardings of the parameter ``name``: one rank along ep holds it; each rank along etp has its columns."""
        index, _, linear = name.removeprefix(self.prefix).rpartition(".")[0].partition(".")
        is_down = linear == self.mlp.down
        # The dim that etp does not shard; other ranks along ep hold none of it.
        dim, size = (0, self.hidden) if is_down else (1, self.hidden)
        if name.endswith(".bias"):
            dim = 0
            size = self.hidden if is_down else self.outputs
        holder = int(index) // (self.count // ep)
        found: dict[Axis, Sharding] = {
            "ep": Sharding(dim, size, tuple(((0, size),) if rank == holder else () for rank in range(ep)))
        }
        if etp > 1:
            sections = [self.width] if is_down else [self.width] * (self.outputs // self.width)
            found["etp"] = shard_sections(1 if is_down else 0, sections, etp)
        return found

    @property
    def outputs(self) -> int:
        """The number of outputs of each linear that takes tokens."""
        return 2 * self.width if self.mlp.has_gate and len(self.mlp.ups) == 1 else self.width

    def weights(self, module: nn.Module, axis: ExpertAxis) -> ExpertWeights:
        """The experts that ``module`` holds on this rank, stacked."""
        local = self.count // axis.ep
        mine = range(axis.ep_rank * local, (axis.ep_rank + 1) * local)

        def of(linears: Sequence[str], leaf: str) -> torch.Tensor:
            each = [f"{self.prefix}{index}.{linear}.{leaf}" for index, linear in itertools.product(mine, linears)]
            return stacked([module.get_parameter(name) for name in each], local)

        ups, downs = self.mlp.ups, (self.mlp.down,)
        biases = (of(ups, "bias"), of(downs, "bias")) if self.has_bias else ()
        return ExpertWeights(of(ups, "weight"), of(downs, "weight"), self.mlp.activation, False, *biases)


def gathered_whole(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` whose forward reads the weights of all experts, which inner modules hold."""
    modules = model.modules()
    return [each for each in modules if LISTED_LAYOUT.get(each) is not None or kinds.calls_for_each_expert(each)]


def list_in(module: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The one list that holds every parameter in ``module``, and the prefix of its experts' names."""
    if isinstance(module, nn.ModuleList):
        return "", module
    lists = [(f"{name}.", child) for name, child in module.named_children() if isinstance(child, nn.ModuleList)]
    others = [child for child in module.children() if not isinstance(child, nn.ModuleList)]
    has_more = kinds.own_shapes(module) or any(True for child in others for _ in child.parameters())
    return lists[0] if len(lists) == 1 and not has_more else None


def looped_over(model: nn.Module) -> Iterator[str]:
    """Descriptions, for messages, of lists of equal MLPs over which the module around them loops itself."""
    for name, module in model.named_modules():
        for child_name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) > 1 and all(map(_linears, child)):
                kind = f"{len(child)} {type(child[0]).__name__} over which {type(module).__name__} loops itself"
                yield f"{names.generic(f'{name}.{child_name}'.lstrip('.'))}, a list of {kind}"


def listed_layout(name: str, module: nn.Module, known: dict[Hashable, Mlp | str]) -> ListedLayout:
    """The layout of the list in ``module``; raises ValueError with the reason where that is not known.

    ``known``: findings about earlier modules, by their likeness.
    """
    installed = LISTED_LAYOUT.get(module)
    if installed is not None:
        return installed
    found = list_in(module)
    if found is None or len(found[1]) == 0:
        raise _unknown(name, module, "it holds no parameter of three dims, and not one list of modules with them all")
    prefix, experts = found
    like = likeness(module)
    reason = _why_not_alike(experts) or known.get(like)
    if reason is None:
        reason = known[like] = _examined(module, prefix, experts)
    if isinstance(reason, str):
        raise _unknown(name, module, reason)
    down = experts[0].get_submodule(reason.down)
    width, hidden = kinds.sizes(down)
    return ListedLayout(len(experts), width, hidden, prefix, reason, _has_bias(down))


def _unknown(name: str, module: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"ds_npu.parallel.expert: {name} ({type(module).__name__}) has the role experts, and {why}. What to do: a "
        f"module {FORWARD}, and which holds its experts as parameters [E, ...] or in one nn.ModuleList of equal MLPs "
        "(nn.Linear for gate, up and down, or for up and down, with an activation between them); docs/experts.md has "
        "one. Or expert 1 and expert_tensor 1"
    )


def _why_not_alike(experts: nn.ModuleList) -> str | None:
    """Why ``experts`` are not equal MLPs; None where they may be."""
    like = likeness(experts[0])
    for index, expert in enumerate(experts):
        if likeness(expert) != like:
            return f"expert {index} in its list is made otherwise than expert 0 ({type(experts[0]).__name__})"
        if reason := own_forward(expert):
            return f"of expert {index} ({type(expert).__name__}) {reason}"
    return None


def _examined(module: nn.Module, prefix: str, experts: nn.ModuleList) -> Mlp | str:
    """The MLP that the experts compute, or the reason why it is not known."""
    with isolated_on_cpu() as generator:
        found = next(_fitting(experts[0], generator), None)
        if found is None:
            return f"{type(experts[0]).__name__} computes something else than the MLPs that ds_npu knows"
        hidden = kinds.sizes(experts[0].get_submodule(found.down))[1]
        if not _routes(module, prefix, len(experts), hidden, generator):
            return "its forward computes something else than each token's sum over its experts, times its weights"
    return found


class _StandIn(nn.Module):
    """A stand-in for an expert in a copy of the module around it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x + x.sin()


def _routes(module: nn.Module, prefix: str, count: int, hidden: int, generator: torch.Generator) -> bool:
    """Whether ``module`` computes the weighted sum over each token's experts, whatever these compute."""
    experts = nn.ModuleList([_StandIn(index + 1.0) for index in range(count)])
    chosen = min(CHOSEN, count)
    ids = torch.rand(TOKENS, count, generator=generator).argsort(1)[:, :chosen]

    def ours(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        each = torch.stack([expert(x) for expert in experts], 1)
        return (each.gather(1, ids.unsqueeze(2).expand(-1, -1, hidden)) * weights.unsqueeze(2)).sum(1)

    children = {prefix[:-1]: experts} if prefix else dict(experts.named_children())
    theirs = forward_of_copy(module, {}, children)
    x = random_input(generator, TOKENS, hidden)
    weights = random_input(generator, TOKENS, chosen)
    return computes_the_same(lambda x, weights: theirs(x, ids, weights), ours, x, weights)


def _linears(expert: nn.Module) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the linears directly in ``expert``; empty where other modules in it hold parameters."""
    found = {name: kinds.sizes(each) for name, each in expert.named_children() if type(each) is nn.Linear}
    others = [each for name, each in expert.named_children() if name not in found]
    return {} if kinds.own_shapes(expert) or any(True for each in others for _ in each.parameters()) else found


def _has_bias(linear: nn.Module) -> bool:
    return "bias" in kinds.own_shapes(linear)


def _fitting(expert: nn.Module, generator: torch.Generator) -> Iterator[Mlp]:
    """The descriptions that reproduce what ``expert`` computes."""
    sizes = _linears(expert)
    has_bias = {_has_bias(expert.get_submodule(name)) for name in sizes}
    if len(sizes) not in (2, 3) or len(has_bias) != 1:
        return
    for *ups, down in itertools.permutations(sizes):
        width, hidden = sizes[down]
        outputs = sum(sizes[up][1] for up in ups)
        if any(sizes[up][0] != hidden for up in ups) or outputs not in ((width, 2 * width)[len(ups) - 1 :]):
            continue
        for activation in _between(expert, with_gate=outputs > width):
            mlp = Mlp(tuple(ups), down, activation, outputs > width)
            if _is(expert, mlp, next(iter(has_bias)), generator):
                yield mlp


def _between(expert: nn.Module, with_gate: bool) -> Iterator[Activation]:
    """Candidates for the activation of ``expert``: those that it holds, and those that it may call."""
    linears = _linears(expert)
    held: list[Activation] = [child for name, child in expert.named_children() if name not in linears]
    called = [each for each in attributes(expert, object).values() if _is_function(each)]
    for activation in (*held, *called, *KNOWN):
        if with_gate:
            yield partial(gated, activation)
            yield partial(gated_behind, activation)
        else:
            yield activation


def _is_function(value: object) -> TypeGuard[Activation]:
    return callable(value) and not isinstance(value, type)


def gated(activation: Activation, gate_up: torch.Tensor) -> torch.Tensor:
    """``activation`` of the first half of the last dim, times the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


def gated_behind(activation: Activation, up_gate: torch.Tensor) -> torch.Tensor:
    """``activation`` of the second half of the last dim, times the first."""
    up, gate = up_gate.chunk(2, dim=-1)
    return activation(gate) * up


def _is(expert: nn.Module, mlp: Mlp, bias: bool, generator: torch.Generator) -> bool:
    """Whether a copy of ``expert`` with small weights computes ``mlp``."""
    outputs = 2 * N if mlp.has_gate and len(mlp.ups) == 1 else N
    small: dict[str, nn.Module] = {up: nn.Linear(K, outputs, bias).double() for up in mlp.ups}
    small[mlp.down] = nn.Linear(N, K, bias).double()

    def ours(x: torch.Tensor) -> torch.Tensor:
        first = torch.cat([small[up](x) for up in mlp.ups], -1)
        out: torch.Tensor = small[mlp.down](mlp.activation(first))
        return out

    try:
        return computes_the_same(forward_of_copy(expert, {}, small), ours, random_input(generator, TOKENS, K))
    except (RuntimeError, TypeError, ValueError):
        return False  # The candidate is no activation.
