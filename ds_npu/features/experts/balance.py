"""``ds_npu.moe.aux_loss`` and ``z_loss``: added to the loss that a model returns in training.

So every factor applies to them that applies to the loss until backward: loss scale, accumulation, the client's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_npu.config.moe import MoeSection
from ds_npu.features.build import Build
from ds_npu.features.declaration import Change
from ds_npu.features.experts.routing import Collected, Router, collect_ids, collect_logits, collecting, router_of
from ds_npu.models.logits import IGNORED_LABEL
from ds_npu.parallel.expert.balance import BalanceLosses, Scores, TokenRanks
from ds_npu.parallel.pipeline.pass_through import BORDER_STATES
from ds_npu.parallel.runtime.calls import Keywords
from ds_npu.parallel.runtime.forward_wraps import Level, wrap_forward
from ds_npu.parallel.runtime.micro_batch import running

KEYS = "ds_npu.moe.aux_loss and z_loss"


def token_ranks(build: Build) -> TokenRanks:
    """The groups of ranks of a build's engine that hold different tokens."""
    topology = build.topology
    tensor = (topology.group("tp"),) if build.sequence_parallel and topology.size("tp") > 1 else ()
    context = (topology.group("cp"),) if topology.size("cp") > 1 else ()
    data = (topology.group("dp", "cp"),) if topology.size("dp", "cp") > 1 else ()
    return TokenRanks(tensor + context, tensor + data, topology.size("dp"))


def balance_changes(section: MoeSection, build: Build, layouts: Iterable[str]) -> Iterator[Change]:
    """Add the losses to that of the model; raises ValueError where a router is not known."""
    if not section.has_losses:
        return
    model, names = build.model, list(layouts)
    aux = section.aux_loss.coefficient or 0.0
    over = section.aux_loss.over
    z = section.z_loss or 0.0
    routers = {name: _router(model, name, needs_scores=aux > 0) for name in names}
    for name, router in routers.items():
        yield Change("hooks", name, "its choices are collected", partial(collect_ids, name, model.get_submodule(name)))
        make = partial(collect_logits, name, router)
        yield Change("wraps", router.name, "its logits are collected", make, Level.OPERATOR)
    scores = {name: router.scores for name, router in routers.items()}
    forward = _BalancedForward(model, BalanceLosses(aux, over, z), scores, token_ranks(build))
    text = ", ".join([*([f"aux loss {aux:g} over {over}"] if aux else []), *([f"z-loss {z:g}"] if z else [])])
    yield Change("wraps", "", text, partial(wrap_forward, model, forward, Level.MODEL), Level.MODEL)


def _router(model: nn.Module, experts: str, needs_scores: bool) -> Router:
    found = router_of(model, experts)
    if found is None or (needs_scores and found.scores is None):
        why = "is not known" if found is None else f"({found.name}) does not tell whether scores are softmax or sigmoid"
        raise ValueError(
            f"{KEYS}: the router of {experts} in {type(model).__name__} {why}. What to do: leave the keys out, and use "
            "the model's own router_aux_loss_coef, if it has one"
        )
    return found


@dataclass(frozen=True)
class _BalancedForward:
    model: nn.Module
    losses: BalanceLosses
    scores: Mapping[str, Scores | None]
    ranks: TokenRanks

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (self.model.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        given = {**inspect.signature(forward).bind(*args, **kwargs).arguments, **kwargs}
        with collecting() as collected:
            out = forward(*args, **kwargs)
        stage = BORDER_STATES.of(running())
        if stage is not None:
            if any(collected.ids.values()):
                stage.losses.append(self._loss(collected, given))
            return out
        if isinstance(out, torch.Tensor) and out.dim() == 0:
            return out + self._added(collected, given).to(out.dtype)
        loss = out.get("loss") if isinstance(out, MutableMapping) else None
        if not isinstance(loss, torch.Tensor):
            raise ValueError(
                f"{KEYS} are added to the loss that {type(self.model).__name__} returns in training, and it returned "
                "none (as a dict does under the key loss). What to do: give it labels, leave return_dict true, or "
                "leave the keys out"
            )
        out["loss"] = loss + self._added(collected, given).to(loss.dtype)
        return out

    def _added(self, collected: Collected, given: Keywords) -> torch.Tensor:
        loss = self._loss(collected, given)
        items = given.get("num_items_in_batch")
        # The model divides by the labels of several micro-batches and sums their losses: scale this loss by its share.
        added = loss if items is None else loss * (_labels(given) / items)
        _refuse_other_losses(added, [each for layer in collected.logits.values() for each in layer], self.model)
        return added

    def _loss(self, collected: Collected, given: Keywords) -> torch.Tensor:
        ids = given.get("input_ids")
        tokens = given.get("inputs_embeds") if ids is None else ids
        if not isinstance(tokens, torch.Tensor):
            raise ValueError(f"{KEYS}: {type(self.model).__name__} is given neither input_ids nor inputs_embeds")
        return self.losses.of(list(collected.routings(self.scores)), len(tokens), self.ranks)


def _refuse_other_losses(added: torch.Tensor, logits: Iterable[torch.Tensor], model: nn.Module) -> None:
    """Raise ValueError in a backward that reaches a router's ``logits``, but not the ``added`` loss made of them.

    Such a backward would train routers without balance. Gradients reach ``logits`` after all computed from them.
    """
    reached: list[bool] = []

    def check(gradients: tuple[torch.Tensor, ...]) -> None:
        if not reached:
            raise ValueError(
                f"{KEYS} are added to the loss that {type(model).__name__} returns, and this backward is of a loss "
                "that does not contain it: the script makes its own of other outputs, as TRL's trainers do of "
                "log-probabilities. What to do: train on the returned loss (a sum may contain it), or leave the keys "
                "out; with TRL router_aux_loss_coef of its arguments, which it adds to its loss, or "
                "ds_npu.moe.bias_update_rate"
            )

    if added.grad_fn is not None:
        added.grad_fn.register_prehook(lambda gradients: reached.append(True))
        for each in logits:
            if each.grad_fn is not None:
                each.grad_fn.register_prehook(check)


def _labels(given: Keywords) -> torch.Tensor:
    """How many tokens of a batch are to be predicted."""
    shifted: torch.Tensor | None = given.get("shift_labels")
    targets: torch.Tensor = given["labels"][..., 1:] if shifted is None else shifted
    return (targets != IGNORED_LABEL).sum()
