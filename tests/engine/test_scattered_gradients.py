"""Gradients of ZeRO 3, copied once or not at all. test_planned_gathers.py compares lives with DeepSpeed to the bit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from bucketed_lives import PLAIN, WIDTH, Life, batch, steps
from gradient_buffer import Allocations
from ranks import run_on_ranks
from torch import nn
from wire import Wire

pytestmark = pytest.mark.slow
LAYERS = 6
ALL = LAYERS * WIDTH * (WIDTH + 1)
"""Elements of all weights and biases."""


def engine_of(accumulation: int = 2, **zero: object):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    return Life(steps, stage=3, accumulation=accumulation).engine_of(model, {"reduce_bucket_size": 10**6, **zero})


def backward(engine, step: int, micro: int) -> None:
    engine.backward(engine(batch(engine, step, micro)).square().mean())


def passes_over_gradients(engine) -> tuple[Counter[str], int]:
    """Operators that allocated as much as a gradient of a weight, or all of them, and bytes of messages."""
    watched = Allocations({WIDTH * WIDTH, LAYERS * WIDTH * WIDTH, ALL})
    loss = engine(batch(engine, 1, 0)).square().mean()
    with Wire() as wire, watched:
        engine.backward(loss)
    engine.step()
    return Counter(watched.found), sum(size for (kind, _), size in wire.leaving.items() if kind == "scatter")


def count_passes() -> None:
    """Copies of gradients, by the elements of a message: a few weights, all of them, or fewer than a weight has."""
    found = {}
    for name, zero in {"plain": PLAIN, "one": {}, "each": {"reduce_bucket_size": 100}}.items():
        engine = engine_of(**zero)
        for micro in range(2):
            backward(engine, 0, micro)
            engine.step()
        found[name], sent = passes_over_gradients(engine)
        # What a rank sends: each gradient but its own part, once.
        assert sent == 4 * ALL // 2, (name, sent)
        (bucket,) = engine.optimizer.ipg_buckets.values()
        assert bucket.buffer.numel() == (10**6 if name == "plain" else 1)
    # Each product is allocated, and nothing else of its size but the message.
    assert found["one"] == {"aten::mm": LAYERS, "aten::cat": 1}, found
    assert found["each"] == {"aten::mm": LAYERS}, found
    assert found["plain"]["aten::mm"] == LAYERS, found


def test_a_gradient_is_copied_at_most_once():
    run_on_ranks(2, count_passes)


def two_backwards() -> None:
    """DeepSpeed writes the second over the first; of a weight that was used once more in between, too."""
    engine = engine_of()
    for between in (False, True):
        losses = [engine(batch(engine, 0, micro)).square().mean() for micro in range(2)]
        engine.backward(losses[0])
        if between:
            with torch.no_grad():
                engine.module[0](batch(engine, 0, 0))
        with pytest.raises(RuntimeError, match=r"5\.weight: its gradient came twice since .*What to do"):
            engine.backward(losses[1])
        engine = engine_of()


def test_two_backwards_behind_two_forwards_are_an_error():
    run_on_ranks(2, two_backwards)


def caught(zero: dict[str, object]) -> None:
    """A script that catches an error in a backward cannot go on, where other ranks have, or wait for, its gradients."""
    engine = engine_of(**zero)
    backward(engine, 0, 0)
    out = engine(batch(engine, 0, 1))
    failing = engine.module[2].bias.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(out.square().mean())
    failing.remove()
    with pytest.raises(RuntimeError, match="the backward before it ended with an error"):
        engine(batch(engine, 1, 0))


@pytest.mark.parametrize("elements", [100, 10**6])
def test_an_error_in_a_backward_is_not_forgotten(elements):
    run_on_ranks(2, caught, {"reduce_bucket_size": elements})


def stepped(accumulation: int, ranks: int) -> None:
    """Against one process; three ranks do not divide exactly, and DeepSpeed's own code sends for them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).double()
    life = Life(steps, stage=3, accumulation=accumulation, dtype=torch.float64)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).double()
    plain.load_state_dict(model.state_dict())
    engine = life.engine_of(model, {})
    for step in range(1):
        for micro in range(accumulation):
            backward(engine, step, micro)
            engine.step()
        norm = torch.as_tensor(engine.get_global_grad_norm())
        losses = []
        for micro in range(accumulation):
            for rank in range(ranks):
                seed = (step * 16 + micro) * 16 + rank
                x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
                losses.append(plain(x).square().mean())
        plain.zero_grad()
        (sum(losses) / len(losses)).backward()
        expected = torch.cat([each.grad.flatten() for each in plain.parameters()]).norm()
        assert abs(float(norm / expected) - 1) <= 1e-12, (step, norm, expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_norms_are_those_of_one_process(ranks):
    run_on_ranks(ranks, stepped, 3, ranks)
