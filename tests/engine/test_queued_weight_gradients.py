"""Two stages, two layers, 1F1B: weight gradients that are computed later than the backward of their micro-batch.

Each rank has one stage of a model in a DeepSpeed engine. Shape letters: B batch, S sequence, V vocabulary, H hidden.
"""

from __future__ import annotations

from typing import Any

import gradient_rule as rule
import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import nn

from ds_npu.features.pipeline.stages import cut_into_stages, run_stage, stages_of
from ds_npu.models.globs import plan_for
from ds_npu.parallel.pipeline.pass_through import Stage
from ds_npu.zero_ext.held_reduction import HeldReduction

MICRO_BATCHES = 4
SCHEDULES = (
    "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
    "F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3",
)
"""Of each stage: forward, backward and weight gradients of a micro-batch."""
EXACT, SINGLE = 1e-12, 1e-6
"""ZeRO keeps its masters, and most of its norms, in float32, whatever the model."""


PLAN = {"0": "embedding", "[12]": "block", "[12].*": "replicated", "3": "head"}
QUEUED = (["1.0.weight", "0.weight"], ["3.weight", "2.1.weight"])
"""Of each stage: the weights of a micro-batch whose gradients come later, in the order of backward."""


def whole() -> nn.Module:
    """The layers of ``rule``, those in the middle as two blocks: each holds what it computes with."""
    embedding, linear, norm, head = rule.layers()
    return nn.Sequential(embedding, nn.Sequential(linear), nn.Sequential(norm, nn.Linear(rule.H, rule.H)), head)


class Runner:
    """Runs the actions of one stage on micro-batches [B, S + 1] of words; hidden states travel between two ranks."""

    def __init__(self, held: HeldReduction, model: nn.Module, own: Stage, other: int, batches: Any) -> None:
        self.held, self.model, self.own, self.other, self.batches = held, model, own, other, batches
        self.first = own.index == 0
        self.active: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.queued: dict[int, Any] = {}
        self.sends: list[Any] = []
        self.loss = 0.0

    def run(self, action: str) -> None:
        {"F": self.forward, "B": self.backward, "W": self.weights}[action[0]](int(action[1:]))

    def forward(self, index: int) -> None:
        words_BS, labels_BS = self.batches[index][:, :-1], self.batches[index][:, 1:]
        x = None if self.first else self.receive(words_BS).requires_grad_()
        y = run_stage(self.model, self.own, None if x is None else (x,), input=words_BS)
        if self.first:
            (y,) = y
            self.send(y)
        else:
            y = rule.token_loss(y, labels_BS) / MICRO_BATCHES
            self.loss += y.item()
        self.active[index] = x, y

    def backward(self, index: int) -> None:
        x, y = self.active.pop(index)
        self.queued[index] = self.held.backward(y, self.receive(self.batches[index][:, :-1]) if self.first else None)
        if not self.first:
            self.send(x.grad)

    def weights(self, index: int) -> None:
        assert self.queued[index].names == QUEUED[self.own.index]
        self.queued.pop(index).compute()

    def send(self, tensor: torch.Tensor) -> None:
        self.sends.append((dist.isend(tensor.detach(), self.other), tensor))

    def receive(self, words_BS: torch.Tensor) -> torch.Tensor:
        hidden_BSH = torch.empty(*words_BS.shape, rule.H, dtype=next(self.model.parameters()).dtype)
        dist.recv(hidden_BSH, self.other)
        return hidden_BSH


def engine_of(model: nn.Module, zero: int, dtype: torch.dtype) -> Any:
    import deepspeed

    config = rule.config(zero, dtype, {"pipeline": 2}) | {"gradient_accumulation_steps": 1}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def one_step(zero: int, dtype: torch.dtype) -> None:
    """A step of both stages against one process that does the whole batch."""
    dp = dist.get_world_size() // 2
    rank, other = dist.get_rank() // dp, (dist.get_rank() + dp) % (2 * dp)
    model = whole().to(dtype)
    plan = plan_for(model, PLAN)
    own = stages_of(plan, 2)[rank]
    cut_into_stages(model, plan, own)
    engine = engine_of(model, zero, dtype)
    expected = rule.reference(rule.MICRO * MICRO_BATCHES * dp, whole().to(dtype))
    samples = rule.samples(rule.MICRO * MICRO_BATCHES * dp).view(MICRO_BATCHES, dp, rule.MICRO, rule.S + 1)
    held = HeldReduction(engine, queue_weight_gradients=True)
    with held:
        runner = Runner(held, model, own.stage, other, samples[:, engine.topology.rank("dp")])
        for action in SCHEDULES[rank].split():
            runner.run(action)
        for work, _ in runner.sends:
            work.wait()
    gradients = rule.reduced_gradients(engine, model)
    engine.step()
    assert_is_part(gradients, expected.gradients, EXACT if dtype == torch.float64 else SINGLE)
    bound = EXACT if (zero, dtype) == (0, torch.float64) else SINGLE
    assert expected.norm > 2 * rule.CLIP
    assert abs(float(engine.get_global_grad_norm()) / expected.norm - 1) <= bound, (zero, dtype)
    assert_is_part(rule.whole_weights(model), expected.weights, bound)
    if rank == 1:
        assert abs(rule.mean_loss(runner.loss, engine.topology) / expected.loss - 1) <= SINGLE


def assert_is_part(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float) -> None:
    assert found and rule.relative(found, {name: expected[name] for name in found}) <= bound


def all_steps(*dtypes: torch.dtype) -> None:
    rule.without_extension()
    for zero in (0, 1, 2):
        for dtype in dtypes:
            one_step(zero, dtype)


def test_two_stages_train_as_one_process():
    run_on_ranks(2, all_steps, torch.float64)


@pytest.mark.slow
def test_two_stages_on_two_data_parallel_ranks():
    run_on_ranks(4, all_steps, torch.float64, torch.float32)
