"""Steps of a model without an engine, which keys that save memory change by not a bit."""

from __future__ import annotations

import tiny_models
import torch
from torch import nn


def step(model: nn.Module, rows: int = 3, length: int = 13) -> list[torch.Tensor]:
    """The loss, every gradient, and the state of the random generator behind."""
    torch.manual_seed(3)
    ids = tiny_models.tokens(rows, length)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None), torch.get_rng_state()]


def three_backwards(model: nn.Module, *shapes: tuple[int, int]) -> list[torch.Tensor | None]:
    """Every gradient of two micro-batches of these rows and tokens, both in flight; the first has two backwards."""
    losses = [model(input_ids=ids, labels=ids).loss for ids in (tiny_models.tokens(*shape) for shape in shapes)]
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    losses[0].backward()
    return [each.grad for each in model.parameters()]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))
