"""Two stages, two layers, 1F1B: weight gradients that are computed later than the backward of their micro-batch.

Each rank has one half of a model in a DeepSpeed engine. Stages are no placement yet, so the halves are marked as shards
over two tensor ranks: then the norm counts both. Shape letters: B batch, S sequence, V vocabulary, H hidden.
"""

from __future__ import annotations

from typing import Any

import gradient_rule as rule
import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import nn

from ds_npu.zero_ext.held_reduction import HeldReduction

MICRO_BATCHES = 4
SCHEDULES = (
    "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
    "F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3",
)
"""Of each stage: forward, backward and weight gradients of a micro-batch."""
EXACT, SINGLE = 1e-12, 1e-6
"""ZeRO keeps its masters, and most of its norms, in float32, whatever the model."""


class Half(nn.Module):
    """The layers of one stage of ``rule.layers()``."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        names = (("0", "1"), ("2", "3"))[stage]
        self.layers = nn.ModuleDict({name: rule.layers()[int(name)] for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Stage:
    """Runs the actions of one stage on micro-batches [B, S + 1] of words; hidden states travel between two ranks."""

    def __init__(self, held: HeldReduction, half: Half, first: bool, other: int, batches: Any) -> None:
        self.held, self.half, self.first, self.other, self.batches = held, half, first, other, batches
        self.active: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.queued: dict[int, Any] = {}
        self.sends: list[Any] = []
        self.loss = 0.0

    def run(self, action: str) -> None:
        {"F": self.forward, "B": self.backward, "W": self.weights}[action[0]](int(action[1:]))

    def forward(self, index: int) -> None:
        words_BS, labels_BS = self.batches[index][:, :-1], self.batches[index][:, 1:]
        x = words_BS if self.first else self.receive(words_BS).requires_grad_()
        # Not the model's own forward: with tensor ranks it looks for equal batches.
        y = Half.forward(self.half, x)
        if self.first:
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
        assert self.queued[index].names == [f"layers.{name}.weight" for name in ("10" if self.first else "3")]
        self.queued.pop(index).compute()

    def send(self, tensor: torch.Tensor) -> None:
        self.sends.append((dist.isend(tensor.detach(), self.other), tensor))

    def receive(self, words_BS: torch.Tensor) -> torch.Tensor:
        hidden_BSH = torch.empty(*words_BS.shape, rule.H, dtype=next(self.half.parameters()).dtype)
        dist.recv(hidden_BSH, self.other)
        return hidden_BSH


def engine_of(half: nn.Module, stage: int, dtype: torch.dtype) -> Any:
    import deepspeed

    for weight in half.parameters():
        weight.tensor_model_parallel = True
    config = rule.config(stage, dtype, {"tensor": 2}) | {"gradient_accumulation_steps": 1}
    engine, *_ = deepspeed.initialize(model=half, model_parameters=half.parameters(), config=config)
    return engine


def one_step(zero: int, dtype: torch.dtype) -> None:
    """A step of both stages against one process that does the whole batch."""
    rank = dist.get_rank() % 2
    half = Half(rank).to(dtype)
    engine = engine_of(half, zero, dtype)
    dp = engine.topology.size("dp")
    expected = rule.reference(rule.MICRO * MICRO_BATCHES * dp, nn.Sequential(*rule.layers()).to(dtype))
    samples = rule.samples(rule.MICRO * MICRO_BATCHES * dp).view(MICRO_BATCHES, dp, rule.MICRO, rule.S + 1)
    held = HeldReduction(engine, queue_weight_gradients=True)
    with held:
        stage = Stage(held, half, rank == 0, dist.get_rank() ^ 1, samples[:, engine.topology.rank("dp")])
        for action in SCHEDULES[rank].split():
            stage.run(action)
        for work, _ in stage.sends:
            work.wait()
    gradients = rule.reduced_gradients(engine, half)
    engine.step()
    assert_is_half(gradients, expected.gradients, EXACT if dtype == torch.float64 else SINGLE)
    bound = EXACT if (zero, dtype) == (0, torch.float64) else SINGLE
    assert expected.norm > 2 * rule.CLIP
    assert abs(float(engine.get_global_grad_norm()) / expected.norm - 1) <= bound, (zero, dtype)
    assert_is_half(rule.whole_weights(half), expected.weights, bound)
    if rank == 1:
        assert abs(rule.mean_loss(stage.loss, engine.topology) / expected.loss - 1) <= SINGLE


def assert_is_half(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float) -> None:
    plain = {name.removeprefix("layers."): value for name, value in found.items()}
    assert rule.relative(plain, {name: expected[name] for name in plain}) <= bound


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
