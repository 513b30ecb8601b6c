"""Large gradients of ZeRO 3 as messages; that training is DeepSpeed's to the bit is in test_planned_gathers.py."""

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
BIASES = LAYERS * WIDTH


def engine_of(accumulation: int = 2, **zero: object):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    return Life(steps, stage=3, accumulation=accumulation).engine_of(model, {"reduce_bucket_size": 10**6, **zero})


def backward(engine, step: int, micro: int) -> None:
    engine.backward(engine(batch(engine, step, micro)).square().mean())


def passes_over_gradients(engine) -> tuple[Counter[str], list[int]]:
    """Operators that read or write a whole gradient of a weight beside its product, and elements of messages."""
    watched = Allocations({WIDTH * WIDTH, LAYERS * WIDTH * WIDTH})
    loss = engine(batch(engine, 1, 0)).square().mean()
    with Wire() as wire, watched:
        engine.backward(loss)
    engine.step()
    sent = [size // 4 for (kind, _), size in wire.leaving.items() if kind == "scatter"]
    return Counter(watched.found), sent


def count_passes() -> None:
    plain, own = engine_of(**PLAIN), engine_of()
    for engine in (plain, own):
        for micro in range(2):
            backward(engine, 0, micro)
            engine.step()
    found, sent = passes_over_gradients(own)
    copied, sent_plain = passes_over_gradients(plain)
    # What a rank sends: each gradient but its own part, once.
    assert sum(sent) == sum(sent_plain) == (LAYERS * WIDTH * WIDTH + BIASES) // 2, (sent, sent_plain)
    # Each product is allocated, and nothing else of its size.
    assert found == {"aten::mm": LAYERS}, found
    assert copied["aten::mm"] == LAYERS, copied
    # DeepSpeed's bucket had room for all gradients, and has for those of biases.
    (bucket,) = own.optimizer.ipg_buckets.values()
    assert bucket.buffer.numel() == own.optimizer.reduce_bucket_size == BIASES
    (bucket,) = plain.optimizer.ipg_buckets.values()
    assert bucket.buffer.numel() == 10**6


def test_no_gradient_is_copied_before_it_is_sent():
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
