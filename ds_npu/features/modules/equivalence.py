"""Does a part of a user's model compute what an operator does? Both are run on small random inputs and compared.

On the CPU in float64, with copies that have random weights: so it works for weights that are not there yet (on the meta
device, or sharded by ZeRO-3), and changes no weight, no random generator and no device.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import NoneType

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ds_npu.models import kinds
from ds_npu.models.attributes import attributes, has_attribute
from ds_npu.models.hugging_face_model import FLOAT32_TOLERANCE
from ds_npu.parallel.runtime.forward_wraps import innermost_forward
from ds_npu.parallel.runtime.marks import RECORD, marks_of

OF_EVERY_MODULE = frozenset({*attributes(nn.Module(), object), RECORD})
"""Attributes that torch and ds_npu give modules: hooks, parameters, children, and the record of marks."""


@contextmanager
def isolated_on_cpu() -> Iterator[torch.Generator]:
    """Compute on the CPU with gradients and a fixed seed, whatever the user has set; yields a random generator."""
    plain = torch.autocast("cpu", enabled=False)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad(), plain:
        torch.manual_seed(1)
        yield torch.Generator().manual_seed(1)


def random_input(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Float64 numbers on the CPU that require a gradient."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").requires_grad_()


def computes_the_same(theirs: Callable[..., object], ours: Callable[..., object], *inputs: torch.Tensor) -> bool:
    """Whether results, and gradients of inputs that require one, are the same; false where ``theirs`` raises."""
    try:
        expected = _results(theirs, inputs)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    found = _results(ours, inputs)
    return len(found) == len(expected) and all(map(_close, found, expected))


def _results(function: Callable[..., object], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    results = [each for each in pytree.tree_leaves(function(*inputs)) if isinstance(each, torch.Tensor)]
    leaves = [each for each in pytree.tree_leaves(inputs) if isinstance(each, torch.Tensor) and each.requires_grad]
    # Upstream gradients differ between elements, so that no two results can be mistaken for each other.
    upstream = [torch.linspace(1, 2, each.numel(), dtype=each.dtype).view(each.shape) for each in results]
    gradients = torch.autograd.grad(results, leaves, upstream, allow_unused=True)
    return [*results, *(torch.zeros(()) if each is None else each for each in gradients)]


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    largest = float(expected.detach().double().abs().max())
    return float((found.detach().double() - expected.detach().double()).abs().max()) <= FLOAT32_TOLERANCE * largest


def own_forward(module: nn.Module) -> str | None:
    """Why ``module`` does not have its class's forward with one argument; None where it has."""
    forward = innermost_forward(module)
    if not isinstance(forward, types.MethodType) or forward.__func__ is not type(module).forward:
        return "it has been given a forward of its own already"
    # Decorators take any number of arguments.
    arguments = inspect.unwrap(forward.__func__).__code__.co_argcount - 1
    return None if arguments == 1 else f"its forward takes {arguments} arguments, where the operator takes one"


def likeness(module: nn.Module) -> Hashable:
    """Equal for modules of one model that compute alike: class, shapes, attributes and children are the same.

    Numbers and strings are compared by value, other attributes by identity.
    """
    own = [
        (name, value if isinstance(value, int | float | str | NoneType) else id(value))
        for name, value in {**attributes(module, object), **marks_of(module)}.items()
        if name not in OF_EVERY_MODULE
    ]
    children = tuple((name, likeness(child)) for name, child in module.named_children())
    return type(module), tuple(kinds.own_shapes(module).items()), tuple(sorted(own)), children


def forward_of_copy(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], children: Mapping[str, nn.Module]
) -> types.MethodType:
    """The forward of ``module``'s class, bound to a copy in training mode with ``parameters`` and ``children``."""
    made = copy.copy(module)
    kept = {name: child for name, child in module._modules.items() if child is not None}
    made._parameters = dict(parameters)
    # Their order is the one in which a container calls them.
    made._modules = {name: children[name] if name in children else copy.deepcopy(child) for name, child in kept.items()}
    if has_attribute(made, "forward"):
        del made.forward
    made.train()
    return types.MethodType(type(module).forward, made)
