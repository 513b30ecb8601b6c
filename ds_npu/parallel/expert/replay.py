"""Records which experts a forward chose, and makes another forward choose the same.

Rounding may flip a choice between two experts whose scores are close; results then differ by far more than rounding:
between a model that generates and one that trains (RL), two precisions, or two layouts of ranks. For every layer of
experts a record holds the indices of each top-k that its block computes, in order. The replay looks up the values in
its own scores, so that gradients reach the router.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ds_npu.parallel.expert.weights import is_experts
from ds_npu.parallel.runtime.calls import Arguments, Keywords, Operation
from ds_npu.parallel.runtime.marks import Mark

WATCHED: Mark[bool] = Mark("routing is watched")
"""True in the record of a block while its choices are recorded or replayed."""

Result = torch.return_types.topk


@dataclass
class RoutingRecord:
    """The indices [..., k] of each top-k, forward after forward, by the name of a layer's block."""

    choices: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class _TopK(TorchFunctionMode):
    """Passes the result of each ``topk`` through ``choose`` while a block runs."""

    def __init__(self, choose: Callable[[torch.Tensor, Result], Result]) -> None:
        super().__init__()
        self._choose = choose

    def __torch_function__(
        self, func: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores: torch.Tensor = args[0] if args else (kwargs or {})["input"]
        return self._choose(scores, result)


@contextmanager
def record_routing(model: nn.Module, blocks: Collection[str] = ()) -> Iterator[RoutingRecord]:
    """Record the choices of every forward of ``model`` within the context, in order, for this rank's tokens.

    Watches the blocks of modules that hold experts in parameters of three dims, and those named in ``blocks``, which
    models with experts in lists need. Raises ValueError where there are none.
    """
    record = RoutingRecord()

    def chosen(name: str, scores: torch.Tensor, result: Result) -> Result:
        record.choices.setdefault(name, []).append(result.indices.detach())
        return result

    with _each_block(model, blocks, chosen):
        yield record


@contextmanager
def replay_routing(model: nn.Module, record: RoutingRecord) -> Iterator[None]:
    """Make the forwards of ``model`` within the context choose what ``record`` holds, one after the other.

    Raises RuntimeError where a forward has other tokens, another k, or no record is left. Do not recompute activations
    within the context: the recomputation would take the choices of the next forward.
    """
    left = {name: list(each) for name, each in record.choices.items()}

    def chosen(name: str, scores: torch.Tensor, result: Result) -> Result:
        if not left.get(name):
            raise RuntimeError(f"replay_routing: nothing is left that was recorded of {name}")
        indices = left[name].pop(0).to(result.indices.device)
        if indices.shape != result.indices.shape:
            raise RuntimeError(
                f"replay_routing: {name} chooses {list(result.indices.shape)}, and recorded was {list(indices.shape)}: "
                "the tokens of this rank, or the number of experts of each, differ"
            )
        return torch.return_types.topk((scores.gather(-1, indices), indices))

    with _each_block(model, record.choices.keys(), chosen):
        yield


@contextmanager
def _each_block(
    model: nn.Module, blocks: Collection[str], chosen: Callable[[str, torch.Tensor, Result], Result]
) -> Iterator[None]:
    """Call ``chosen`` for every top-k within the ``blocks`` of ``model`` and the blocks that hold experts."""
    running: list[ExitStack] = []
    handles = []

    def enter(name: str, *_: object) -> None:
        running.append(ExitStack())
        running[-1].enter_context(_TopK(partial(chosen, name)))

    def leave(*_: object) -> None:
        running.pop().close()

    modules, watched = dict(model.named_modules()), []
    if missing := set(blocks) - modules.keys():
        raise ValueError(
            f"{type(model).__name__} has no module {min(missing)}, which was named as a block with experts"
        )
    for name, module in modules.items():
        if name in blocks or any(is_experts(child) for child in module.children()):
            WATCHED.set(module, True)
            watched.append(module)
            handles += [
                module.register_forward_pre_hook(partial(enter, name)),
                module.register_forward_hook(leave, always_call=True),
            ]
    if not handles:
        raise ValueError(f"{type(model).__name__} has no module that holds experts")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in watched:
            WATCHED.set(module, False)
