"""Collection of router outputs in one forward; routers are found by transformers' declarations."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ds_npu.features.modules.scaled_inputs import SCALED
from ds_npu.models import names
from ds_npu.models.attributes import attribute
from ds_npu.models.hugging_face_model import logits_recorders
from ds_npu.parallel.expert.balance import Routing, Scores
from ds_npu.parallel.runtime.calls import Arguments, Keywords
from ds_npu.parallel.runtime.forward_wraps import Level, wrap_forward
from ds_npu.parallel.runtime.marks import Mark
from ds_npu.parallel.runtime.micro_batch import Fact, new_forward, running

CORRECTION = "e_score_correction_bias"
"""The name of a router's buffer that is added to the scores by which experts are chosen, and to nothing else."""


OF_NO_EXPERT = ("ZayaExperts",)
"""Classes of transformers' experts whose routers express "no expert" as the first expert with a weight of 0."""


@dataclass(frozen=True)
class Router:
    """The router of one module of experts."""

    name: str
    module: nn.Module
    index: int
    """The index of the logits [T, E] among the router's results."""

    @property
    def scores(self) -> Scores | None:
        """The function that makes scores of logits; None where the router's code does not tell."""
        names_in_code = inspect.unwrap(type(self.module).forward).__code__.co_names
        if ("softmax" in names_in_code) == ("sigmoid" in names_in_code):
            return None
        return "softmax" if "softmax" in names_in_code else "sigmoid"


def router_of(model: nn.Module, experts: str) -> Router | None:
    """The router of the block around the module ``experts``, if transformers declares one."""
    around, block = _block(model, experts)
    recorders = [each for module in model.modules() for each in logits_recorders(module)]
    found = {
        f"{around}.{name}".lstrip("."): (module, index)
        for name, module in block.named_modules()
        for kind, index in recorders
        if type(module) is kind
    }
    if len(found) != 1:
        return None
    ((name, (module, index)),) = found.items()
    return Router(name, module, index)


def correction_of(model: nn.Module, experts: str, count: int) -> tuple[str, torch.Tensor] | None:
    """Name and buffer [E] of the bias that corrects choices in the block around ``experts``; None without one."""
    around, block = _block(model, experts)
    found = [(name, each) for name, each in block.named_buffers() if name.rpartition(".")[2] == CORRECTION]
    if len(found) != 1 or found[0][1].shape != (count,):
        return None
    ((name, buffer),) = found
    return f"{around}.{name}".lstrip("."), buffer


def _block(model: nn.Module, experts: str) -> tuple[str, nn.Module]:
    while experts.endswith(f".{names.BASE_LAYER}"):
        experts = experts.removesuffix(f".{names.BASE_LAYER}")
    around = experts.rpartition(".")[0]
    return around, model.get_submodule(around)


@dataclass
class Collected:
    """Router outputs in the running forward, by the name of a layer's experts."""

    logits: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    ids: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def routings(self, scores: Mapping[str, Scores | None]) -> Iterator[Routing]:
        """The routings of all layers, in the order in which they ran."""
        for name, each in self.ids.items():
            for logits, ids in zip(self.logits[name], each, strict=True):
                yield Routing(logits, ids, scores[name])


_COLLECTED: Fact[Collected] = Fact(while_running=True)
"""Set in a forward that collects, and unset where a part of it is computed again."""
COLLECTS: Mark[bool] = Mark("collects ids")
"""Marks a module of experts whose choices are collected."""


@contextmanager
def collecting() -> Iterator[Collected]:
    """Collect the router outputs of the forward within the block."""
    with new_forward() as micro_batch:
        collected = _COLLECTED.of(micro_batch) or Collected()
        _COLLECTED.set(micro_batch, collected)
        yield collected


def forget_collected() -> None:
    """Clear what the running forward has collected, because it is computed again."""
    if collected := _COLLECTED.of(running()):
        collected.logits.clear()
        collected.ids.clear()


def collect_ids(experts: str, module: nn.Module) -> None:
    """Collect, under the name ``experts``, the expert ids [T, K] that ``module`` is called with."""
    names_of = list(inspect.signature(type(module).forward).parameters)[1:]
    if len(names_of) == 1 and not SCALED.get(module):
        raise ValueError(
            f"ds_npu.moe: {experts} ({type(module).__name__}) is not told which experts its tokens chose, so that "
            "these cannot be counted. What to do: ds_npu.moe.grouped_matmul true, with which it is"
        )

    def hook(_: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        collected = _COLLECTED.of(running())
        if collected is not None:
            ids: torch.Tensor = args[1] if len(args) > 1 else kwargs[names_of[1]]
            if type(module).__name__ in OF_NO_EXPERT:
                weights: torch.Tensor = args[2] if len(args) > 2 else kwargs[names_of[2]]
                # The last of the router's logits is that of no expert.
                ids = ids.masked_fill(weights == 0, attribute(module, "num_experts", int) or 0)
            collected.ids.setdefault(experts, []).append(ids.detach())

    if not COLLECTS.get(module):
        COLLECTS.set(module, True)
        module.register_forward_pre_hook(hook, with_kwargs=True)


def collect_logits(experts: str, router: Router) -> None:
    """Collect, under the name ``experts``, the logits of ``router``, with their graph."""

    def routed(forward: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        collected = _COLLECTED.of(running())
        if collected is None:
            return out
        if not torch.is_grad_enabled():
            raise ValueError(
                f"ds_npu.moe.aux_loss and z_loss: {router.name} runs without a graph in a forward that is trained, as "
                "activation checkpointing with use_reentrant makes it: the loss would have no gradient. What to do: "
                "use_reentrant false"
            )
        collected.logits.setdefault(experts, []).append(out[router.index])
        return out

    # Innermost, for this rank's logits: sequence parallelism gives the model those of all ranks' tokens.
    wrap_forward(router.module, routed, Level.OPERATOR)
