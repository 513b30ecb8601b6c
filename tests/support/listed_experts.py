"""Models of one's own whose experts are modules in a list, and their steps in an engine against one process.

Shape letters: T tokens, K experts of each, E experts, H hidden, F columns of an expert.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import gradient_rule as rule
import pytest
import tensor_parallel_rule as dense
import torch
from expert_capacity import limited_forward
from gradient_rule import H
from torch import nn
from torch.nn import functional

from ds_npu.models.zero3 import unpartitioned_shape
from ds_npu.parallel import record_routing, replay_routing
from ds_npu.parallel.tensor.shard_access import allow_shard_access

E, F, K = 4, 6, 2
EXPERTS = {"moe.experts": "experts"}
PLAN = {"**": "replicated", "moe": "moe", **EXPERTS}


class Gated(nn.Module):
    """As in remote code of Mixtral: names that do not say which is the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*size, bias=False) for size in ((H, F), (F, H), (H, F)))
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.act_fn(self.w1(x)) * self.w3(x))


class Fused(nn.Module):
    """One linear for up and gate, in this order, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.proj_in, self.proj_out = nn.Linear(H, 2 * F), nn.Linear(F, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.proj_in(x).chunk(2, -1)
        return self.proj_out(up * functional.gelu(gate, approximate="tanh"))


class Square(nn.Module):
    """Linears of equal shapes, without a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False)
        self.act = functional.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x)))


def sequential() -> nn.Module:
    """As the experts of DeepSpeed's examples."""
    return nn.Sequential(nn.Linear(H, F), nn.GELU(), nn.Linear(F, H))


class Loop(nn.Module):
    """A list within the module that takes tokens, experts and weights."""

    def __init__(self, expert) -> None:
        super().__init__()
        self.experts = nn.ModuleList([expert() for _ in range(E)])

    def forward(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x_TH)
        for index, expert in enumerate(self.experts):
            token, choice = torch.where(ids_TK == index)
            out = out.index_add(0, token, expert(x_TH[token]) * weights_TK[token, choice, None])
        return out


class Itself(nn.ModuleList):
    """The list is the module, as in transformers 4.57."""

    def __init__(self, expert) -> None:
        super().__init__([expert() for _ in range(E)])

    forward = None


def _loop(self, hidden_states, top_k_index, top_k_weights):
    out = torch.zeros_like(hidden_states)
    mask = functional.one_hot(top_k_index, len(self)).permute(2, 1, 0)
    for index in mask.sum((-1, -2)).nonzero():
        choice, token = torch.where(mask[index[0]])
        state = self[int(index)](hidden_states[None, token].reshape(-1, hidden_states.shape[-1]))
        out.index_add_(0, token, state * top_k_weights[token, choice, None])
    return out


Itself.forward = _loop
KINDS = OrderedDict(gated=(Loop, Gated), fused=(Loop, Fused), square=(Itself, Square), sequential=(Itself, sequential))
"""By name: the module around the list, and an expert."""


class Block(nn.Module):
    """A router and experts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        around, expert = KINDS[kind]
        self.router, self.experts = nn.Linear(H, E, bias=False), around(expert)
        with torch.no_grad():
            for weight in self.parameters():
                weight.mul_(2)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        x_TH = x_BSH.flatten(0, 1)
        weights, ids = self.router(x_TH).softmax(-1).topk(K, -1)
        return self.experts(x_TH, ids, weights).view_as(x_BSH)


class ListNet(nn.Module):
    """Embedding, linear, experts by a router, norm and head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.dense, self.norm, self.head = rule.layers()
        self.moe = Block(kind)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x = self.dense(self.embed(tokens_BS))
        return self.head(self.norm(x + self.moe(x)))


@dataclass(frozen=True)
class Case:
    """What a run is made with."""

    kind: str
    parallel: dict
    moe: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    is_frozen: bool = False
    is_partitioned: bool = False
    """Whether ZeRO 3 has partitioned the model (zero.Init) before it is given to an engine."""

    @property
    def section(self) -> dict:
        plan = PLAN if self.parallel.get("tensor", 1) > 1 else EXPERTS
        return {"parallel": self.parallel, "moe": self.moe, "plan": plan}


def started(case: Case, stage: int):
    import deepspeed

    model = ListNet(case.kind).to(case.dtype)
    model.moe.experts.requires_grad_(not case.is_frozen)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    config = rule.config(stage, case.dtype, case.parallel, stage3_param_persistence_threshold=0)
    config["ds_npu"] = case.section
    if case.is_partitioned:
        deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=case.dtype)
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0], model


def reference(case: Case, count: int) -> rule.Reference:
    """One process, which drops of each micro-batch what is beyond a capacity."""
    model, factor = ListNet(case.kind), case.moe.get("capacity_factor")
    if factor is not None:
        pieces = [piece.tolist() for piece in torch.arange(count * rule.S).split(rule.MICRO * rule.S)]
        experts = model.moe.experts
        experts.forward = limited_forward(experts.forward, E, (factor, "probs", pieces))
    return rule.reference(count, model)


def whole(model: nn.Module, gradients: dict[str, torch.Tensor], topology) -> dict[str, torch.Tensor]:
    """The gradients of all ranks' experts, from each rank's ``gradients``."""
    named = dict(model.named_parameters())
    # DeepSpeed leaves out parameters without elements, as those of other ranks' experts are.
    missing = {name: each for name, each in named.items() if name not in gradients}
    absent = {name: torch.zeros(unpartitioned_shape(each)).double() for name, each in missing.items()}
    assert all(each.numel() == 0 for each in absent.values()) and bool(absent) == (topology.size("ep") > 1)
    gradients = gradients | absent
    return {name: dense.assembled(topology, each, gradients[name]).cpu() for name, each in named.items()}


def step(kind: str, parallel: dict, stages: tuple[int, ...], **more: object) -> None:
    """Every stage of ZeRO against one process in float64: loss, gradients, norm, and the weights after a step."""
    rule.without_extension()
    case = Case(kind, parallel, **more)
    for stage in stages:
        engine, model = started(case, stage)
        topology = engine.topology
        expected = reference(case, rule.MICRO * rule.ACCUMULATION * topology.size("dp"))
        share = 0.0
        for index, (inputs, labels) in enumerate(rule.my_batches(topology)):
            loss = rule.token_loss(engine(inputs), labels)
            share += loss.item() / rule.ACCUMULATION
            engine.backward(loss)
            if index == rule.ACCUMULATION - 1:
                gradients = rule.reduced_gradients(engine, model)
            engine.step()
        gradients = whole(model, gradients, topology)
        weights = {name: each.double() for name, each in dense.shared(engine.whole_state_dict()).items()}
        assert weights.keys() == expected.weights.keys() == dict(ListNet(kind).state_dict()).keys()
        loose = dense.SINGLE if stage else dense.EXACT
        where = (case, stage)
        assert abs(rule.mean_loss(share, topology) / expected.loss - 1) <= dense.EXACT, where
        error = rule.relative(gradients, expected.gradients)
        assert error <= dense.EXACT, (*where, error)
        error = abs(float(engine.get_global_grad_norm()) / expected.norm - 1)
        assert error <= loose, (*where, error)
        error = rule.relative(weights, expected.weights)
        assert error <= loose, (*where, error)


def replayed(parallel: dict, stage: int) -> None:
    """Ranks choose the experts that another model chose, whose router is another one."""
    rule.without_extension()
    engine, _ = started(Case("gated", parallel), stage)
    # One process of the same tokens.
    inputs, labels = rule.my_batches(engine.topology)[0]
    other = ListNet("gated").double()
    with record_routing(other, ["moe"]) as record:
        free = rule.token_loss(ListNet("gated").double()(inputs), labels)
        with torch.no_grad():
            other.moe.router.weight.mul_(-1)
        other(inputs)
    plain = ListNet("gated").double()
    with replay_routing(plain, record):
        expected = rule.token_loss(plain(inputs), labels)
    with replay_routing(engine.module, record):
        found = rule.token_loss(engine(inputs), labels)
    assert abs(found / expected - 1) <= dense.EXACT and abs(free / expected - 1) > dense.SINGLE, (parallel, stage)


def resumed(kind: str, parallel: dict, stages: tuple[int, ...], folder: str) -> None:
    """Steps after a checkpoint are, to the bit, those of the run that wrote it, also where experts are frozen."""
    rule.without_extension()
    for stage, is_frozen in [*((stage, False) for stage in stages), (2, True)]:
        case = Case(kind, parallel, dtype=torch.float32, is_frozen=is_frozen)
        runs = [started(case, stage)[0] for _ in range(2)]
        with allow_shard_access():
            for weight in runs[1].module.moe.experts.parameters() if is_frozen else ():
                weight.data.add_(1)
        losses(runs[0], 2)
        assert runs[0].save_checkpoint(f"{folder}/{stage}{is_frozen}")
        expected = losses(runs[0], 2)
        assert runs[1].load_checkpoint(f"{folder}/{stage}{is_frozen}")[0] is not None
        assert losses(runs[1], 2) == expected, (kind, parallel, stage)
        other = Case(kind, {"expert_tensor": 2}, dtype=torch.float32, is_frozen=is_frozen)
        engine = started(other, (stage + 1) % 4)[0]
        assert engine.load_checkpoint(f"{folder}/{stage}{is_frozen}")[0] is not None
        # Sums of float32 in other orders.
        assert losses(engine, 2) == pytest.approx(expected, rel=1e-5), (kind, parallel, stage)


def losses(engine, steps: int) -> list[float]:
    found = []
    for inputs, labels in rule.my_batches(engine.topology) * steps:
        loss = rule.token_loss(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


class LoopsItself(nn.Module):
    """A block that routes and loops: nothing can be put between."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(H, E), nn.ModuleList([Gated() for _ in range(E)])


class Wrong(Loop):
    """It weighs the squares of what experts compute."""

    def forward(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        return super().forward(x_TH, ids_TK, weights_TK.square())


class Dropping(Gated):
    """An MLP with dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(super().forward(x), 0.5, self.training)


class Different(nn.Module):
    """Experts of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(H, F + i), nn.GELU(), nn.Linear(F + i, H)) for i in (0, 1)]
        )

    def forward(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        return x_TH
