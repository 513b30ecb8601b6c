"""A new kind of product is one class: it rounds to 8 bits, under everything that stands around products.

``use_product`` and ``ExpertWeights.product`` take it; gradients are those of plain PyTorch with rounded operands in one
process.
"""

from __future__ import annotations

import dataclasses
import itertools

import expert_cases
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import nn
from toy_product import Nearest, Rounded, reference_linear

from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.experts import ExpertOptions, compute_experts
from ds_npu.parallel.expert.weights import ExpertWeights
from ds_npu.parallel.tensor.axis import Always
from ds_npu.parallel.tensor.chunked_loss import ChunkedLoss, TargetWords
from ds_npu.parallel.tensor.direct_layers import use_product
from ds_npu.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear, group_projections
from ds_npu.parallel.tensor.overlapped_matmul import Pipelined
from ds_npu.parallel.tensor.region import RegionInput
from ds_npu.parallel.tensor.weight_gradient import GradientQueue, GradientSink
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

B, S, H, N, WORDS = 2, 8, 6, 8, 5
EXACT = {"rtol": 1e-12, "atol": 1e-12}
SIZES = {"gate": (H, N), "up": (H, N), "down": (N, H), "whole": (H, H), "head": (H, WORDS)}


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: torch.randn(outputs, inputs).double() for name, (inputs, outputs) in SIZES.items()}


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(B, S, H, dtype=torch.float64, generator=generator)
    return x, torch.randint(WORDS, (B, S), generator=generator)


def reference(passes: int) -> dict[str, torch.Tensor]:
    """The loss, and the gradients of x and of all weights, of ``passes`` backwards."""
    of = {name: each.requires_grad_() for name, each in weights().items()}
    x, words = inputs()
    x.requires_grad_()
    for _ in range(passes):
        y = torch.tanh(reference_linear(x, of["gate"])) * reference_linear(x, of["up"])
        y = reference_linear(torch.tanh(reference_linear(y, of["down"])), of["whole"])
        logits = reference_linear(y, of["head"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="sum")
        loss.backward()
    return {"loss": loss.detach(), "x": x.grad, **{name: each.grad for name, each in of.items()}}


class Toy(nn.Module):
    """Gate and up over the tensor ranks, down back from them, and a linear that is whole on each."""

    def __init__(self, topology: Topology, sequence_parallel: bool, pieces: int) -> None:
        super().__init__()
        options = {"bias": False, "sequence_parallel": sequence_parallel, "dtype": torch.float64}
        self.gate, self.up = (ColumnParallelLinear(H, N, topology, **options) for _ in range(2))
        self.down = RowParallelLinear(N, H, topology, **options)
        self.whole = nn.Linear(H, H, bias=False, dtype=torch.float64)
        if pieces > 1:
            collectives = Always(Pipelined(topology.group("tp"), pieces))
            for layer in (self.gate, self.up, self.down):
                layer.axis = dataclasses.replace(layer.axis, collectives=collectives)
        group_projections([self.gate, self.up])
        rank, half = topology.rank("tp"), N // topology.size("tp")
        mine, of = slice(rank * half, (rank + 1) * half), weights()
        with torch.no_grad():
            for name in ("gate", "up"):
                self.get_submodule(name).weight.copy_(of[name][mine])
            self.down.weight.copy_(of["down"][:, mine])
            self.whole.weight.copy_(of["whole"])
        self.mine = mine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entered = RegionInput.of(x, self.gate.axis, None)
        return self.whole(torch.tanh(self.down(torch.tanh(self.gate(entered)) * self.up(entered))))


def layers() -> None:
    topology = Topology(Degrees(tp=2))
    for sequence_parallel, pieces, queued in [(False, 1, False), (True, 1, True), (True, 2, False), (True, 2, True)]:
        model = Toy(topology, sequence_parallel, pieces)
        use_product(model, Rounded())
        queue, later = GradientQueue(), []
        queue.is_open = queued
        for name, weight in model.named_parameters():
            sink = GradientSink(weight, lambda dtype, weight=weight: weight.grad, direct=not queued)
            sink.name, sink.queue = name, queue
        x, words = inputs()
        head = weights()["head"].requires_grad_()
        rows = x.chunk(2, 1)[topology.rank("tp")].clone() if sequence_parallel else x
        words = words.chunk(2, 1)[topology.rank("tp")] if sequence_parallel else words
        rows.requires_grad_()
        loss_of = ChunkedLoss(WORDS, None, topology, model.whole.layout)
        for _ in range(2):
            loss = loss_of(model(rows), head, None, TargetWords(words), tokens=3)
            loss.backward()
            later.append(queue.collect())
        assert all(bool(each.names) == queued for each in later)
        for each in later:
            each.compute()
        hold(topology, model, {"loss": loss.detach(), "x": rows.grad, "head": head.grad}, sequence_parallel)


def hold(topology: Topology, model: Toy, found: dict, sequence_parallel: bool) -> None:
    right = reference(2)
    found |= {name: model.get_submodule(name).weight.grad for name in ("gate", "up", "down", "whole")}
    for name in ("gate", "up"):
        right[name] = right[name][model.mine]
    right["down"] = right["down"][:, model.mine]
    if sequence_parallel:
        right["x"] = right["x"].chunk(2, 1)[topology.rank("tp")]
        # Each rank has its part of the tokens.
        for name in ("loss", "head", "whole"):
            dist.all_reduce(found[name])
    for name, each in right.items():
        torch.testing.assert_close(found[name], each, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def experts() -> None:
    """Every level, dispatcher and layout, in backward at once and queued."""
    axis = ExpertAxis.of(Topology(Degrees(dp=2, ep=2)), tokens_are_sharded=False)
    levels = itertools.product(("alltoall", "allgather", "fused"), ("none", "level1"), (False, True))
    for (dispatcher, level, queued), layout in itertools.product(levels, expert_cases.LAYOUTS.values()):
        fed = [expert_cases.tokens_of(rank, "any") for rank in range(2)]
        whole = {name: each.requires_grad_() for name, each in layout.weights().items()}
        outs = [plain(*each, whole, layout) for each in fed]
        sum(out.square().sum() for out in outs).backward()
        own = {name: layout.shard(name, each.detach(), axis).requires_grad_() for name, each in whole.items()}
        biases = own.get("up_bias"), own.get("down_bias")
        weights = ExpertWeights(
            own["up"], own["down"], layout.activation, layout.is_transposed, *biases, product=Rounded()
        )
        queue = GradientQueue()
        queue.is_open = queued
        for name in ("up", "down"):
            sink = GradientSink(own[name], lambda dtype, weight=own[name]: weight.grad, direct=False)
            sink.name, sink.queue = name, queue
        out = compute_experts(*fed[axis.rank], weights, axis, ExpertOptions(dispatcher, level))
        out.square().sum().backward()
        later = queue.collect()
        assert later.names == (["up", "down"] if queued else [])
        later.compute()
        torch.testing.assert_close(out, outs[axis.rank], **EXACT)
        for name, each in own.items():
            torch.testing.assert_close(each.grad, layout.shard(name, whole[name].grad, axis), **EXACT)


def plain(x, ids, weights, of, layout):
    """``expert_cases.plain`` with rounded operands."""
    out = torch.zeros_like(x)
    for expert, choice in itertools.product(range(expert_cases.E), range(expert_cases.K)):
        chosen = (ids[:, choice] == expert).nonzero()[:, 0]
        up, down = (of[name][expert].t() if layout.is_transposed else of[name][expert] for name in ("up", "down"))
        first = reference_linear(x[chosen], up)
        first = layout.activation(first + of["up_bias"][expert] if layout.has_bias else first)
        # Experts multiply activations by routing weights first.
        y = Nearest.apply(first * weights[chosen, choice, None]) @ Nearest.apply(down).t()
        if layout.has_bias:
            y = y + of["down_bias"][expert] * weights[chosen, choice, None]
        out = out.index_add(0, chosen, y)
    return out


def test_linear_layers_and_a_head_by_a_product_that_rounds():
    run_on_ranks(2, layers)


def test_experts_by_a_product_that_rounds():
    run_on_ranks(2, experts)
