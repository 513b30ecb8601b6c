"""A toy layer of experts, of which each expert-parallel rank holds others, in a model and its step in an engine.

Tokens choose their expert by their number, and every rank sends all its tokens to all ranks of its expert-parallel
group. Shape letters: N tokens, H hidden, F the experts' hidden size.
"""

from __future__ import annotations

import gradient_rule as rule
import torch
import torch.distributed as dist
from gradient_rule import H
from torch import nn
from torch.nn import functional

from ds_npu.comm.crossing import collect, gather, scatter_sum, shard
from ds_npu.parallel.runtime.placement import mark_sharded, placement_of
from ds_npu.parallel.tensor.sharding import shard_sections
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

EXPERTS, F = 4, 6
STEPS = 2
EXACT, SINGLE = 1e-12, 1e-6
DECAY = 0.01


class ToyExperts(nn.Module):
    def __init__(self, topology: Topology | None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.topology = topology
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, *size) / 3) for size in ((H, F), (F, H)))
        if topology is not None:
            sharding = shard_sections(0, [EXPERTS], topology.size("ep"))
            for weight in (self.up, self.down):
                weight.data = sharding.take(weight.data, topology.rank("ep"))
                mark_sharded(weight, sharding, "ep")

    def forward(self, x_NH: torch.Tensor, choice_N: torch.Tensor) -> torch.Tensor:
        if self.topology is None:
            return self.compute(x_NH, choice_N, 0)
        tensor, experts = self.topology.group("tp"), self.topology.group("ep")
        # Tensor ranks hold equal tokens and send a share each.
        x, choice = shard(x_NH, 0, tensor), shard(choice_N, 0, tensor)
        first = self.topology.rank("ep") * len(self.up)
        out = self.compute(gather(x, 0, experts), gather(choice, 0, experts), first)
        return collect(scatter_sum(out, 0, experts), 0, tensor)

    def compute(self, x_NH: torch.Tensor, choice_N: torch.Tensor, first: int) -> torch.Tensor:
        out = torch.zeros_like(x_NH)
        for index in range(len(self.up)):
            mine = (choice_N == first + index)[:, None].to(x_NH.dtype)
            out = out + functional.silu((x_NH * mine) @ self.up[index]) @ self.down[index] * mine
        return out


class Net(nn.Module):
    def __init__(self, topology: Topology | None) -> None:
        super().__init__()
        self.embed, self.dense, self.norm, self.head = rule.layers()
        self.experts = ToyExperts(topology)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x = self.dense(self.embed(tokens_BS))
        x = x + self.experts(x.flatten(0, 1), tokens_BS.flatten() % EXPERTS).view_as(x)
        return self.head(self.norm(x))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups of the client's own, each with dense weights and experts'; the second decays and is slower."""
    up, rest = [], []
    for name, weight in model.named_parameters():
        (up if name in ("experts.up", "dense.weight") else rest).append(weight)
    return torch.optim.SGD([{"params": up, "lr": rule.LR}, {"params": rest, "lr": 0.25, "weight_decay": DECAY}])


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 0.25**step])


def reference(count: int):
    """Loss, gradients and norm of the first step, and the weights after all."""
    model = Net(None).double()
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    tokens, found = rule.samples(count), None
    for _ in range(STEPS):
        loss = rule.token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(model.parameters(), rule.CLIP)
        found = found or (loss.item(), gradients, norm.item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return (*found, {name: each.detach().clone() for name, each in model.named_parameters()})


def own_part(whole: dict[str, torch.Tensor], model: nn.Module, topology: Topology) -> dict[str, torch.Tensor]:
    shardings = {name: placement_of(each).sharded.get("ep") for name, each in model.named_parameters()}
    rank = topology.rank("ep")
    return {name: shardings[name].take(each, rank) if shardings[name] else each for name, each in whole.items()}


def step(stage: int, parallel: dict[str, int], dtype: torch.dtype = torch.float64) -> None:
    """Two steps of this world's engine against one process in float64: gradients and norm of the first, the weights."""
    import deepspeed

    rule.without_extension()
    degrees = Degrees(
        tp=parallel.get("tensor", 1),
        cp=parallel.get("context", 1),
        ep=parallel["expert"],
        dp=dist.get_world_size() // (parallel.get("tensor", 1) * parallel.get("context", 1)),
    )
    model = Net(Topology(degrees)).to(dtype)
    config = rule.config(stage, dtype, parallel)
    del config["optimizer"]
    optimizer = optimizer_of(model)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule_of(optimizer), config=config
    )
    topology = engine.topology
    loss, gradients, norm, weights = reference(rule.MICRO * rule.ACCUMULATION * topology.size("dp"))
    gradients, weights = own_part(gradients, model, topology), own_part(weights, model, topology)
    for turn in range(STEPS):
        share = 0.0
        for index, (inputs, labels) in enumerate(rule.my_batches(topology)):
            mine = rule.token_loss(engine(inputs.to(engine.device)), labels.to(engine.device))
            share += mine.item() / rule.ACCUMULATION
            engine.backward(mine)
            if turn == 0 and index == rule.ACCUMULATION - 1:
                found = rule.reduced_gradients(engine, model)
            engine.step()
        if turn == 0:
            errors = {
                "loss": abs(rule.mean_loss(share, topology) / loss - 1),
                **{name: rule.relative({name: found[name]}, {name: each}) for name, each in gradients.items()},
                "norm": abs(float(engine.get_global_grad_norm()) / norm - 1),
            }
    found = {name: each.cpu() for name, each in rule.whole_weights(model).items()}
    errors["weights"] = rule.relative(found, weights)
    # ZeRO keeps its masters, and most of its norms, in float32.
    loose = {"norm", "weights"} if stage else set()
    exact = EXACT if dtype == torch.float64 else SINGLE
    wrong = {name: error for name, error in errors.items() if not error <= (SINGLE if name in loose else exact)}
    assert not wrong, (stage, parallel, wrong)
