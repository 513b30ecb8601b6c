"""A layer of experts on ranks against the plain loop over experts, in one process and float64.

Shape letters: T tokens, K experts of each, E experts, H hidden, F outputs of the first product, I inputs of the second.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.capacity import compute_in_shares
from ds_npu.parallel.expert.experts import ExpertOptions, compute_experts
from ds_npu.parallel.expert.weights import ExpertWeights
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

E, H, COLUMNS, K = 8, 6, 10, 3
EXACT = 1e-12

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """How a family of models stores its experts."""

    has_gate: bool = True
    is_transposed: bool = False
    has_bias: bool = False

    def activation(self, first: torch.Tensor) -> torch.Tensor:
        if not self.has_gate:
            # Not gelu: that of NPUs is its approximation by tanh.
            return functional.silu(first)
        gate, up = first.chunk(2, -1)
        return functional.silu(gate) * (up + 1)

    def weights(self) -> Tensors:
        torch.manual_seed(7)
        width = 2 * COLUMNS if self.has_gate else COLUMNS
        made = {
            "up": torch.randn(E, width, H, dtype=torch.float64),
            "down": torch.randn(E, H, COLUMNS, dtype=torch.float64),
        }
        if self.is_transposed:
            made = {name: each.transpose(1, 2).contiguous() for name, each in made.items()}
        if self.has_bias:
            made |= {"up_bias": torch.randn(E, width).double(), "down_bias": torch.randn(E, H).double()}
        return made

    def shard(self, name: str, whole: torch.Tensor, axis: ExpertAxis) -> torch.Tensor:
        """Experts over ep, and of each its columns over etp: gates and ups alike."""
        mine = whole.chunk(axis.ep)[axis.ep_rank]
        if axis.etp == 1:
            return mine.clone()
        if name == "down_bias":
            # Of the ranks that share an expert the last adds it.
            return mine * float(axis.etp_rank == axis.etp - 1)
        sections = 2 if self.has_gate and name.startswith("up") else 1
        dim = 1 if name == "up_bias" or (name == "up") != self.is_transposed else 2
        parts = [each.chunk(axis.etp, dim)[axis.etp_rank] for each in mine.chunk(sections, dim)]
        return torch.cat(parts, dim)


LAYOUTS = {
    "gate": Layout(),
    "transposed with biases": Layout(is_transposed=True, has_bias=True),
    "no gate": Layout(has_gate=False),
}


def tokens_of(rank: int, routing: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What one rank feeds: another number of tokens on each rank; with "none here" rank 0 has none."""
    torch.manual_seed(100 + rank)
    count = 0 if routing == "none here" and rank == 0 else 5 + 2 * rank
    x, weights = torch.randn(count, H).double(), torch.rand(count, K).double()
    ids = torch.rand(count, E).argsort(1)[:, :K]
    if routing == "one expert":
        ids = torch.tensor([[E - 1] + [-1] * (K - 1)]).repeat(count, 1)
    if routing == "some nowhere":
        ids = torch.where(torch.rand(count, K) < 0.4, -1, ids)
    return x, ids, weights


def plain(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, of: Tensors, layout: Layout) -> torch.Tensor:
    """The loop over experts, as transformers' eager forwards write it."""
    out = torch.zeros_like(x)
    for expert, choice in itertools.product(range(E), range(K)):
        chosen = (ids[:, choice] == expert).nonzero()[:, 0]
        up, down = of["up"][expert], of["down"][expert]
        first = x[chosen] @ (up if layout.is_transposed else up.t())
        if layout.has_bias:
            first = first + of["up_bias"][expert]
        y = layout.activation(first) @ (down if layout.is_transposed else down.t())
        if layout.has_bias:
            y = y + of["down_bias"][expert]
        out = out.index_add(0, chosen, y * weights[chosen, choice, None])
    return out


def coefficients(rank: int, like: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(200 + rank)
    return torch.randn(like.shape, dtype=torch.float64, device="cpu")


@functools.cache
def expected(ranks: tuple[int, ...], routing: str, layout: Layout) -> tuple[list[Tensors], Tensors]:
    """By rank, its output and the gradients of its tokens and routing weights; and the gradients of all weights."""
    of = {name: each.requires_grad_() for name, each in layout.weights().items()}
    fed = [tokens_of(rank, routing) for rank in ranks]
    results = []
    for rank, (x, ids, weights) in zip(ranks, fed, strict=True):
        x.requires_grad_(), weights.requires_grad_()
        out = plain(x, ids, weights, of, layout)
        (out * coefficients(rank, out)).sum().backward()
        results.append({"out": out.detach(), "x": x.grad, "weights": weights.grad})
    return results, {name: each.grad for name, each in of.items()}


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    if found.shape != right.shape:
        return float("inf")
    return (
        float((found.cpu().double() - right).abs().max() / right.abs().max().clamp(min=1e-6)) if right.numel() else 0.0
    )


@dataclass(frozen=True)
class Numbers:
    """What a world computes in, and where."""

    dtype: torch.dtype = torch.float64
    device: str = "cpu"

    @property
    def exact(self) -> float:
        # Sums of rounded products, whose terms may be larger than they.
        return EXACT if self.dtype == torch.float64 else 1e-5

    def leaf(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(self.device, self.dtype).requires_grad_()


@dataclass(frozen=True)
class LayerCase:
    """One layer."""

    routing: str
    layout: Layout
    options: ExpertOptions
    shared: bool
    """Whether the tensor ranks hold equal tokens."""


def check_layer(topology: Topology, case: LayerCase, numbers: Numbers) -> None:
    """One forward and backward on this world."""
    degrees, layout, shared = topology.degrees, case.layout, case.shared
    axis = ExpertAxis.of(topology, tokens_are_sharded=not shared)
    source = topology.ranks("tp")[0] if shared else topology.global_rank
    sources = tuple(sorted({ranks[0] for ranks in degrees.groups("tp")}) if shared else range(degrees.world_size))
    results, gradients = expected(sources, case.routing, layout)
    mine = results[sources.index(source)]
    x, ids, weights = tokens_of(source, case.routing)
    x, ids, weights = numbers.leaf(x), ids.to(numbers.device), numbers.leaf(weights)
    of = {name: numbers.leaf(layout.shard(name, each, axis)) for name, each in layout.weights().items()}
    biases = of.get("up_bias"), of.get("down_bias")
    experts = ExpertWeights(of["up"], of["down"], layout.activation, layout.is_transposed, *biases)

    def compute(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return compute_experts(x, ids, weights, experts, axis, case.options)

    out = compute_in_shares(compute, x, ids, weights, axis.same_tokens) if shared else compute(x, ids, weights)
    (out * coefficients(source, out).to(out)).sum().backward()
    found = {"out": out.detach(), "x": x.grad, "weights": weights.grad}
    errors = {name: off(found[name], each) for name, each in mine.items()}
    for name, each in of.items():
        grad = torch.zeros_like(each) if each.grad is None else each.grad
        if topology.size("edp") > 1:
            dist.all_reduce(grad, group=topology.group("edp"))
        whole = name == "down_bias"
        right = gradients[name].chunk(axis.ep)[axis.ep_rank] if whole else layout.shard(name, gradients[name], axis)
        errors[name] = off(grad, right)
    wrong = {name: error for name, error in errors.items() if not error <= numbers.exact}
    assert not wrong, (degrees, case, wrong)


ROUTINGS = ("any", "one expert", "some nowhere", "none here")
ALL_OPTIONS = [
    ExpertOptions(dispatcher, level)  # type: ignore[arg-type]
    for dispatcher in ("alltoall", "allgather")
    for level in ("none", "level0", "level1")
] + [ExpertOptions("alltoall", "none", 1), ExpertOptions("allgather", "level1", 1)]


def check_world(degrees: Degrees, dtype: torch.dtype = torch.float64, device: str = "cpu") -> None:
    """Every routing, layout, dispatcher and level on this world."""
    topology = Topology(degrees)
    for each in itertools.product(ROUTINGS, LAYOUTS.values(), ALL_OPTIONS, {False, degrees.tp > 1}):
        if each[2].replica_rows and each[1].has_bias and degrees.etp > 1:
            continue  # Only the first rank of an expert has its second bias.
        check_layer(topology, LayerCase(*each), Numbers(dtype, device))
