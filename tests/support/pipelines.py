"""Toy models in stages over ranks, run by any schedule, against one process in float64."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_npu.parallel.pipeline.executor import PipelineError, PipelineRun
from ds_npu.parallel.pipeline.schedule import Schedule
from ds_npu.parallel.pipeline.transfers import PipelineLinks, Tensors

H = 5
Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]


class Layers(nn.Module):
    """The layers of one stage; their weights depend on the numbers of the layers."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for number in numbers:
            torch.manual_seed(number)
            self.layers.append(nn.Sequential(nn.Linear(H, H), nn.Tanh()))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sample(micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets; micro-batches have other lengths each."""
    torch.manual_seed(1000 + micro_batch)
    return torch.randn(2, 3 + micro_batch % 3, H).double(), torch.randn(2, 3 + micro_batch % 3, H).double()


def shapes_of(schedule: Schedule) -> list[int]:
    return [3 + index % 3 for index in range(schedule.micro_batches)]


def loss_of(output: torch.Tensor, micro_batch: int) -> torch.Tensor:
    return (output - sample(micro_batch)[1]).square().mean()


class Alive:
    """Something that lives as long as the graph of a stage's forward."""

    now = most = 0

    def __init__(self) -> None:
        Alive.now += 1
        Alive.most = max(Alive.now, Alive.most)

    def __del__(self) -> None:
        Alive.now -= 1


class Counted(torch.autograd.Function):
    """``x``, whose graph is counted."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, has_graph: bool) -> torch.Tensor:
        ctx.alive = Alive() if has_graph else None
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient, None


class ToyStage:
    """A stage of ``Layers`` whose weight gradients are computed apart, by autograd, from a graph that is kept."""

    def __init__(self, index: int, count: int, layers: int) -> None:
        self.index, self.count = index, count
        self.module = Layers(range(index * layers, (index + 1) * layers))

    def forward(self, micro_batch: int, arrived: Tensors | None) -> Tensors:
        out = self.module(sample(micro_batch)[0] if arrived is None else arrived[0])
        out = Counted.apply(out, torch.is_grad_enabled())
        return (loss_of(out, micro_batch) if self.index == self.count - 1 else out,)

    def state(self):
        return nullcontext()

    def backward(self, outputs: Tensors, gradients: Tensors | None):
        output, gradient = outputs[0], None if gradients is None else gradients[0]
        weights = list(self.module.parameters())
        leaves = [each for each in _leaves(output) if all(each is not weight for weight in weights)]
        if leaves:
            torch.autograd.backward(output, gradient, inputs=leaves, retain_graph=True)
        return Later(output, gradient, weights)


class Later:
    def __init__(self, output, gradient, weights) -> None:
        self.call = output, gradient, weights

    def compute(self) -> None:
        output, gradient, weights = self.call
        torch.autograd.backward(output, gradient, inputs=weights)


def _leaves(output: torch.Tensor) -> list[torch.Tensor]:
    found, seen, todo = [], set(), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [each for each, _ in node.next_functions]
    return found


def run(schedule: Schedule, groups: Groups, bound: float = 0.0) -> None:
    """One run on this world against one process: losses, every gradient to ``bound``, and graphs alive at once."""
    layers = 2
    rank = dist.get_rank()
    own = {stage for stage, owner in schedule.rank_of.items() if owner == rank}
    stages = {stage: ToyStage(stage, schedule.stages, layers) for stage in own}
    done = PipelineRun(schedule, rank, stages, PipelineLinks(groups, torch.device("cpu")))
    Alive.now = Alive.most = 0
    done.run(shapes_of(schedule))
    assert Alive.most == schedule.peak_activations[rank], (Alive.most, schedule.peak_activations)
    whole = Layers(range(schedule.stages * layers))
    losses = []
    # In the order in which the last stage's micro-batches go backwards: sums are then the same to the bit.
    for index in range(schedule.micro_batches):
        loss = loss_of(whole(sample(index)[0]), index)
        loss.backward()
        losses.append(loss.detach())
    if schedule.stages - 1 in own:
        assert [float(done.losses[index] - each) for index, each in enumerate(losses)] == [0.0] * len(losses)
    for stage, number in itertools.product(own, range(layers)):
        expected = whole.layers[stage * layers + number][0].weight.grad
        found = stages[stage].module.layers[number][0].weight.grad
        assert (found - expected).abs().max() <= bound, (stage, number, (found - expected).abs().max())


def dying(schedule: Schedule) -> None:
    """Rank 1 dies in its third forward; rank 0 says what it waited for."""
    stages = {dist.get_rank(): ToyStage(dist.get_rank(), 2, 1)}
    if dist.get_rank() == 1:
        forward = stages[1].forward

        def die(micro_batch: int, arrived: Tensors | None) -> Tensors:
            if micro_batch == 2:
                os._exit(0)
            return forward(micro_batch, arrived)

        stages[1].forward = die
    links = PipelineLinks((dist.new_group(), dist.new_group()), torch.device("cpu"))
    with pytest.raises(PipelineError, match=r"rank 0 waited in cell \d \(0I[12]\) for 1I[12] of rank 1, which failed"):
        PipelineRun(schedule, dist.get_rank(), stages, links).run(shapes_of(schedule))
    # There is nobody left to meet at the harness's barrier.
    os._exit(0)


def standing_still(schedule: Schedule) -> None:
    """Rank 1 hangs in its third forward; rank 0 says, within the time that groups wait, what it waited for."""
    stages = {dist.get_rank(): ToyStage(dist.get_rank(), 2, 1)}
    patience = timedelta(seconds=3)
    links = PipelineLinks((dist.new_group(timeout=patience), dist.new_group(timeout=patience)), torch.device("cpu"))
    if dist.get_rank() == 1:
        forward = stages[1].forward

        def hang(micro_batch: int, arrived: Tensors | None) -> Tensors:
            if micro_batch == 2:
                time.sleep(7)
                os._exit(0)
            return forward(micro_batch, arrived)

        stages[1].forward = hang
    said = r"rank 0 waited in cell \d \(0I[12]\) for 1I[12] of rank 1, which failed or did not answer in time: .*3000ms"
    with pytest.raises(PipelineError, match=said):
        PipelineRun(schedule, dist.get_rank(), stages, links).run(shapes_of(schedule))
    os._exit(0)


def run_all(*schedules: Schedule) -> None:
    """To the bit."""
    for schedule in schedules:
        run(schedule, (dist.new_group(), dist.new_group()))


def run_in_any_order(*schedules: Schedule) -> None:
    """They add up the gradients of micro-batches in orders of their own."""
    groups = dist.new_group(), dist.new_group()
    for schedule in schedules:
        run(schedule, groups, bound=1e-13)
