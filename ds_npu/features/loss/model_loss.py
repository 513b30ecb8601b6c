"""The loss function of one model as a chain: features put links around the model's own loss.

Each link has a level, and links of an outer level are called first: features may add theirs in any order. transformers'
models call ``self.loss_function(logits, labels, vocab_size, ...)``, a property that each model can be given a function
of its own for (modeling_utils.py, PreTrainedModel.loss_function, 5.23).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import nn

from ds_npu.models.attributes import attribute
from ds_npu.models.hugging_face_model import HuggingFaceModel, is_hugging_face, transformers_module
from ds_npu.parallel.runtime.forward_wraps import disable_tracing
from ds_npu.parallel.runtime.marks import Mark
from ds_npu.parallel.runtime.micro_batch import Fact, MicroBatch, running

LossFunction = Callable[..., torch.Tensor]
LossLink = Callable[..., torch.Tensor]
"""``link(inner, *args, **kwargs)``, called in place of ``inner(*args, **kwargs)``, which is the rest of the chain."""

MODEL_LOSS: Mark[ModelLoss] = Mark("model loss")
"""The chain that is the loss of a model."""


@runtime_checkable
class HasLossFunction(Protocol):
    """A model whose forward calls ``self.loss_function``, which can be set."""

    loss_function: LossFunction


class LossLevel(IntEnum):
    """The purpose of a link, outermost first. A chain has at most one link of each level."""

    SHARE = 0
    """This rank's share of the loss of a batch: the labels of its own tokens, the number of labels of all."""
    CHUNKS = 1
    """The loss with the head, a chunk of tokens at a time: instead of the inner links, where no logits exist."""
    VOCABULARY = 2
    """The loss of logits whose vocabulary is sharded: instead of the inner links, where the logits are not whole."""
    OPERATOR = 3
    """The computation itself, in an operator of ours, instead of the model's own."""


@dataclass(frozen=True)
class _Link:
    function: LossLink
    key: str
    """The key of the section whose feature added it."""


@dataclass
class LossRun:
    """The result of a model's loss function in one forward."""

    calls: int = 0
    computed: torch.Tensor | None = None
    _returned: torch.Tensor | None = None

    def record(self, computed: torch.Tensor) -> torch.Tensor:
        """Record one call; returns the loss for the model."""
        # A clone: the model may add to what it is given in place.
        self.calls, self.computed, self._returned = self.calls + 1, computed, computed.clone()
        return self._returned

    def added(self, loss: torch.Tensor) -> torch.Tensor | None:
        """The part of ``loss`` that the model added to the computed loss (a router's auxiliary loss); None: nothing."""
        if self.computed is None or (loss is self._returned and loss._version == 0):
            return None
        return loss - self.computed


class ModelLoss:
    """The loss function of one model: its links around ``own``, the function it had before."""

    def __init__(self, model: str, own: LossFunction) -> None:
        """``model``: the name of its class, for errors."""
        self.model, self.own = model, own
        self._links: dict[LossLevel, _Link] = {}
        self._run: Fact[LossRun] = Fact(while_running=True)

    @property
    def keys(self) -> dict[LossLevel, str]:
        """Keys of the section whose features have a link, by level, outermost first."""
        return {level: self._links[level].key for level in LossLevel if level in self._links}

    def link(self, level: LossLevel) -> LossLink | None:
        """The link of this level, if there is one."""
        found = self._links.get(level)
        return None if found is None else found.function

    def add(self, link: LossLink, level: LossLevel, key: str) -> None:
        """Add a link of the feature ``key``; raises ValueError where the chain has one of this level."""
        if level in self._links:
            both = f"ds_npu.{self._links[level].key} and ds_npu.{key}"
            raise ValueError(f"{both} both set the {level.name.lower()} link of {self.model}'s loss; turn one off")
        self._links[level] = _Link(link, key)

    def check_not_replaced(self, model: HasLossFunction) -> None:
        """Raise ValueError where ``model``, whose loss this is, has been given another loss function since."""
        found = model.loss_function
        if found is not self:
            features = " and ".join(f"ds_npu.{key}" for key in self.keys.values())
            raise ValueError(
                f"the loss_function of {self.model} was replaced by {found}: it leaves out the loss of {features}, "
                "without which the loss is wrong. What to do: set loss_function before deepspeed.initialize, which "
                "refuses what it cannot use, or give the model no labels, and compute the loss from its logits"
            )

    def watch(self, micro_batch: MicroBatch) -> None:
        """Record what is computed in the forward of ``micro_batch``, which begins."""
        self._run.set(micro_batch, LossRun())

    def run_of(self, micro_batch: MicroBatch) -> LossRun:
        """The LossRun of the forward of ``micro_batch`` so far."""
        return self._run.of(micro_batch) or LossRun()

    @disable_tracing
    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        function = self.own
        for level in reversed(self.keys):
            function = partial(self._links[level].function, function)
        computed, run = function(*args, **kwargs), self._run.of(running())
        return computed if run is None else run.record(computed)


def wrap_loss(model: HasLossFunction, link: LossLink, level: LossLevel, key: str) -> ModelLoss:
    """Put ``link`` of the feature ``key`` of the section into the loss of this one ``model``; returns the loss.

    Raises ValueError where another feature has put a link of ``level`` there, or where the loss of the model has been
    replaced since the first link.
    """
    loss = MODEL_LOSS.get(model)
    if loss is None:
        loss = ModelLoss(type(model).__name__, model.loss_function)
        MODEL_LOSS.set(model, loss)
        model.loss_function = loss
    loss.check_not_replaced(model)
    loss.add(link, level, key)
    return loss


def link_of(model: object, level: LossLevel) -> LossLink | None:
    """The link of ``level`` in the loss of ``model``, if there is one."""
    loss = MODEL_LOSS.get(model)
    return None if loss is None else loss.link(level)


def own_loss(model: HasLossFunction) -> LossFunction:
    """The loss function that ``model`` has without ds_npu."""
    loss = MODEL_LOSS.get(model)
    return model.loss_function if loss is None else loss.own


def has_causal_lm_loss(model: nn.Module) -> TypeGuard[HuggingFaceModel]:
    """Whether the loss of ``model`` is transformers' ForCausalLMLoss, a mean over next tokens."""
    return is_hugging_face(model) and own_loss(model) is transformers_module("loss.loss_utils").ForCausalLMLoss


def users_loss(model: object) -> LossFunction | None:
    """The loss function that was set on this one ``model`` of transformers, not by ds_npu; None: it has its class's."""
    found = attribute(model, "_loss_function", object)
    return found if callable(found) and not isinstance(found, ModelLoss) else None
