"""Whether a part of a user's model computes what an operator does: both are run on small random numbers.

Everything happens on the CPU in float64, on copies with random weights, so that it holds for weights that are not there
yet (on the meta device, or sharded by ZeRO-3), and so that no weight, no random generator and no device is disturbed.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ds_npu.parallel.forward_wraps import innermost_forward

TOLERANCE = 1e-5
"""Of the largest value: models compute parts of themselves in float32, even where all else is float64."""


@contextmanager
def isolated_on_cpu() -> Iterator[torch.Generator]:
    """Where probes run, whatever the user has set; yields a source of random numbers."""
    plain = torch.autocast("cpu", enabled=False)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad(), plain:
        torch.manual_seed(1)
        yield torch.Generator().manual_seed(1)


def random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Float64 numbers that want a gradient."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").requires_grad_()


def computes_the_same(theirs: Callable[..., Any], ours: Callable[..., Any], *inputs: Any) -> bool:
    """Whether both give the same results, and gradients of the inputs that want one; false where ``theirs`` raises."""
    try:
        expected = _outcome(theirs, inputs)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    found = _outcome(ours, inputs)
    return len(found) == len(expected) and all(map(_close, found, expected))


def _outcome(function: Callable[..., Any], inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    results = [each for each in pytree.tree_leaves(function(*inputs)) if isinstance(each, torch.Tensor)]
    leaves = [each for each in pytree.tree_leaves(inputs) if isinstance(each, torch.Tensor) and each.requires_grad]
    # Numbers that depend on the place, so that no two results can be mistaken for each other.
    upstream = [torch.linspace(1, 2, each.numel(), dtype=each.dtype).view(each.shape) for each in results]
    gradients = torch.autograd.grad(results, leaves, upstream, allow_unused=True)
    return [*results, *(torch.zeros(()) if each is None else each for each in gradients)]


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    largest = float(expected.detach().double().abs().max())
    return float((found.detach().double() - expected.detach().double()).abs().max()) <= TOLERANCE * largest


def own_forward(module: nn.Module) -> str | None:
    """Why the forward of ``module`` is not its class's, with one argument; None where it is."""
    forward = innermost_forward(module)
    if not isinstance(forward, types.MethodType) or forward.__func__ is not type(module).forward:
        return "it has been given a forward of its own already"
    arguments = forward.__func__.__code__.co_argcount - 1
    return None if arguments == 1 else f"its forward takes {arguments} arguments, where the operator takes one"


def forward_of_copy(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], children: Mapping[str, nn.Module]
) -> Callable[[torch.Tensor], Any]:
    """The forward of ``module``'s class on a copy in training with other ``parameters`` and ``children``."""
    made = copy.copy(module)
    kept = {name: child for name, child in vars(module)["_modules"].items() if child is not None}
    others = {name: copy.deepcopy(child) for name, child in kept.items() if name not in children}
    vars(made).update(_parameters=dict(parameters), _modules={**others, **children})
    vars(made).pop("forward", None)
    made.train()
    return types.MethodType(type(module).forward, made)
