"""The loss of one model: its function, its labels where the batch is divided, how many tokens it computes at a time.

The loss function is a chain: features put links around the model's own loss.

Each link has a level, and links of an outer level are called first: features may add theirs in any order. transformers'
models call ``self.loss_function(logits, labels, vocab_size, ...)``, a property that each model can be given a function
of its own for (modeling_utils.py, PreTrainedModel.loss_function, 5.23).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import nn

from ds_npu.models.attributes import attribute
from ds_npu.models.hugging_face_model import HuggingFaceModel, is_hugging_face, transformers_module
from ds_npu.models.logits import IGNORED_LABEL, LABEL_ARGUMENTS
from ds_npu.parallel.runtime.calls import Keywords
from ds_npu.parallel.runtime.forward_wraps import disable_tracing
from ds_npu.parallel.runtime.marks import Mark
from ds_npu.parallel.runtime.micro_batch import Fact, MicroBatch, running
from ds_npu.parallel.tensor.cross_entropy import next_token_targets
from ds_npu.planner.chunk_choice import ChunkedHead

LossFunction = Callable[..., torch.Tensor]
LossLink = Callable[..., torch.Tensor]
"""``link(inner, *args, **kwargs)``, called in place of ``inner(*args, **kwargs)``, which is the rest of the chain."""

MODEL_LOSS: Mark[ModelLoss] = Mark("model loss")
"""The chain that is the loss of a model."""
LOSS_CHUNKS: Mark[LossChunks] = Mark("loss chunks")
"""The loss chunks of a model."""
SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False, "ForTokenClassification": False}
"""Losses of transformers that are a mean over tokens: whether token s predicts token s + 1, or itself."""
COUNT = "num_items_in_batch"
FUSED_HEAD = "fused_lm_head"
"""The argument with which TRL's trainers ask a model for the scores of its labelled tokens in place of logits."""
LOG_PROBS, LABEL_MASK = "log_probs", "label_mask"
"""Two of these scores: the log-probability of each label, and whether there is a label."""


@runtime_checkable
class HasLossFunction(Protocol):
    """A model whose forward calls ``self.loss_function``, which can be set."""

    loss_function: LossFunction


class LossLevel(IntEnum):
    """The purpose of a link, outermost first. A chain has at most one link of each level."""

    SHARE = 0
    """This rank's share of the loss of a batch: the labels of its own tokens, the number of labels of all."""
    CHUNKS = 1
    """The loss of hidden states, a chunk of tokens at a time: replaces the inner links where no logits exist."""
    VOCABULARY = 2
    """The loss of logits whose vocabulary is sharded: replaces the inner links where the logits are not whole."""
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
        computed = function(*args, **kwargs)
        run = self._run.of(running())
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
    found = None if loss is None else loss._links.get(level)
    return None if found is None else found.function


def own_loss(model: HasLossFunction) -> LossFunction:
    """The loss function that ``model`` has without ds_npu."""
    loss = MODEL_LOSS.get(model)
    return model.loss_function if loss is None else loss.own


def has_causal_lm_loss(model: nn.Module) -> TypeGuard[HuggingFaceModel]:
    """Whether the loss of ``model`` is transformers' ForCausalLMLoss, a mean over next tokens."""
    return is_hugging_face(model) and own_loss(model) is transformers_module("loss.loss_utils").ForCausalLMLoss


def users_loss(model: object) -> LossFunction | None:
    """The loss function that the user set on this one ``model`` of transformers; None: it has its class's."""
    found = attribute(model, "_loss_function", object)
    return found if callable(found) and not isinstance(found, ModelLoss) else None


def shifts(model: HuggingFaceModel, key: str, remedy: str) -> bool | None:
    """Whether the loss of ``model`` compares each token's logits with the next token; None for a model without a loss.

    Raises ValueError, which names the ``key`` that divides the loss and the ``remedy``, for a loss that is no mean over
    tokens, or not known.
    """
    if model.loss_type is None and "labels" not in inspect.signature(model.forward).parameters:
        return None
    # As transformers chooses it (modeling_utils.py, PreTrainedModel.loss_function).
    kind = model.loss_type or "ForCausalLM"
    mapping: Mapping[str, Callable[..., torch.Tensor]] = transformers_module("loss.loss_utils").LOSS_MAPPING
    name = mapping[kind].__name__ if kind in mapping else str(kind)
    own = users_loss(model)
    # ds_npu.parallel.VocabParallelLoss, which a script may have set, means the same.
    if name not in SHIFTS or (own is not None and not own.__module__.startswith("ds_npu.")):
        raise ValueError(
            f"{type(model).__name__} has the loss {name if own is None else own}: over the ranks of "
            f"{key} only {', '.join(SHIFTS)} of transformers can be divided, which are means over "
            f"tokens. What to do: {remedy}"
        )
    return SHIFTS[name]


def asks_for_scores(given: Keywords) -> bool:
    """Whether a forward with the arguments ``given`` returns scores in place of logits."""
    return bool(given.get(FUSED_HEAD)) and any(given.get(name) is not None for name in LABEL_ARGUMENTS)


class Targets:
    """The label that each token of a batch is to predict, [B, S], and how many tokens have one."""

    def __init__(self, given: Keywords, shifted: bool) -> None:
        """``given``: the arguments of a forward; ``shifted``: whether its ``labels`` are those of the next token."""
        self.ignored: int = given.get("ignore_index", IGNORED_LABEL)
        self.tokens: torch.Tensor | None = given.get("shift_labels")
        labels: torch.Tensor | None = given.get("labels")
        if self.tokens is None and labels is not None:
            # Shifted before the sequence is sharded: a shard's last token predicts the first of another rank's.
            self.tokens = next_token_targets(labels, None, self.ignored) if shifted else labels
        self.count: torch.Tensor | int | None = given.get(COUNT)
        if self.tokens is not None and self.count is None:
            self.count = (self.tokens != self.ignored).sum()


@dataclass
class LossChunks:
    """The number of tokens in a chunk of one model's loss."""

    tokens: int
    is_planned: bool
    """Whether a plan is to choose another number."""
    around: Callable[[ChunkedHead], AbstractContextManager[object]] = nullcontext
    """Makes the context in which the loss of a head is computed."""


def loss_chunks_of(model: object) -> LossChunks | None:
    """The LossChunks of ``model``, if its loss is chunked on this rank."""
    return LOSS_CHUNKS.get(model)
