"""The loss of a Hugging Face model whose sequences are sharded over the context ranks.

Each rank's share is the sum over its tokens divided by the number of labelled tokens of the whole batch. So shares add
up to the loss of one process, wherever tokens, padding and documents fall.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ds_npu.comm.crossing import reduce
from ds_npu.features.context_parallel.sharded_batch import RunningBatch, ShardedBatch
from ds_npu.models.attributes import attribute
from ds_npu.models.hugging_face_model import HuggingFaceModel, transformers_module
from ds_npu.models.logits import IGNORED_LABEL
from ds_npu.parallel.micro_batch import Fact, MicroBatch, running

SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False, "ForTokenClassification": False}
"""Losses of transformers that are a mean over tokens: whether token s predicts token s + 1, or itself."""
COUNT = "num_items_in_batch"


def shifts(model: HuggingFaceModel) -> bool | None:
    """Whether the loss of ``model`` compares each token's logits with the next token; None for a model without a loss.

    Raises ValueError for a loss that is no mean over tokens, or not known.
    """
    if model.loss_type is None and "labels" not in inspect.signature(model.forward).parameters:
        return None
    # As transformers chooses it (modeling_utils.py, PreTrainedModel.loss_function).
    kind = model.loss_type or "ForCausalLM"
    mapping: Mapping[str, Callable[..., torch.Tensor]] = transformers_module("loss.loss_utils").LOSS_MAPPING
    name = mapping[kind].__name__ if kind in mapping else str(kind)
    own = attribute(model, "_loss_function", object)
    # ds_npu's own, put there by a feature that was applied before, mean the same.
    if name not in SHIFTS or (own is not None and not own.__module__.startswith("ds_npu.")):
        raise ValueError(
            f"{type(model).__name__} has the loss {name if own is None else own}: over the ranks of "
            f"ds_npu.parallel.context only {', '.join(SHIFTS)} of transformers can be divided, which are means over "
            "tokens. What to do: give it no labels, and compute the loss from its logits"
        )
    return SHIFTS[name]


class Targets:
    """The label that each token of a batch is to predict, [B, S], and how many tokens have one."""

    def __init__(self, given: Mapping[str, Any], shifted: bool) -> None:
        """``given``: the arguments of a forward; ``shifted``: whether its ``labels`` are those of the next token."""
        self.ignored: int = given.get("ignore_index", IGNORED_LABEL)
        self.tokens: torch.Tensor | None = given.get("shift_labels")
        labels: torch.Tensor | None = given.get("labels")
        if self.tokens is None and labels is not None:
            # Before the sequence is sharded: the last token of a shard predicts the first of another rank's.
            self.tokens = functional.pad(labels, (0, 1), value=self.ignored)[..., 1:] if shifted else labels
        self.count: torch.Tensor | int | None = given.get(COUNT)
        if self.tokens is not None and self.count is None:
            self.count = (self.tokens != self.ignored).sum()


@dataclass
class _Share:
    """This rank's share of the loss of one forward."""

    arguments: dict[str, Any]
    """Arguments of the loss function that are not what the model gives it."""
    computed: torch.Tensor | None = None
    returned: torch.Tensor | None = None
    calls: int = 0


class LossShare:
    """Replaces the loss function of one model: computes this rank's share, with the labels of this rank's tokens."""

    def __init__(self, usual: Callable[..., torch.Tensor], running_batch: RunningBatch, shifted: bool) -> None:
        self.usual, self.running_batch, self.shifted = usual, running_batch, shifted
        self._share: Fact[_Share] = Fact(while_running=True)

    def expect(self, micro_batch: MicroBatch, arguments: dict[str, Any]) -> None:
        """Override these arguments of the loss function in the forward that begins, which must call it once."""
        self._share.set(micro_batch, _Share(arguments))

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        share = self._share.of(running())
        if share is None or self.running_batch.sharded is None:
            return self.usual(*args, **kwargs)
        share.computed = self.usual(*args, **{**kwargs, **share.arguments})
        # A clone: the model may add to what it is given in place.
        share.calls, share.returned = share.calls + 1, share.computed.clone()
        return share.returned

    def whole(self, loss: torch.Tensor, micro_batch: MicroBatch, batch: ShardedBatch, who: str) -> torch.Tensor:
        """The loss of the whole batch, the same on every rank; in backward each rank gets the gradient of its share.

        ``loss`` is what the model ``who`` made of the share: it may add the routers' auxiliary loss, which is whole on
        each rank. Raises ValueError where it made anything else of it.
        """
        found = self._share.of(micro_batch)
        calls, share = (0, None) if found is None else (found.calls, found.computed)
        if found is None or share is None or calls != 1:
            raise ValueError(
                f"{who} called its loss_function {calls} times in a forward with labels, so its loss is its own, "
                "and the share of this rank's tokens is not known. What to do: give it no labels, and compute the loss "
                "from its logits"
            )
        whole = reduce(share, batch.group)
        if loss is found.returned and loss._version == 0:
            return whole
        if not batch.gathers_routers:
            raise ValueError(
                f"{who} adds something of its own to the loss of its tokens, which ds_npu.parallel.context cannot "
                "divide over its ranks"
            )
        return whole + (loss - share)
