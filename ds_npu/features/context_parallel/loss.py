"""The loss of a Hugging Face model whose sequences are sharded: each rank's share of it, by the tokens that count.

A share is the sum over this rank's tokens divided by the number of the whole batch's, so shares add up to the loss of
one process, however tokens, padding and documents fall.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch.nn import functional

from ds_npu.comm.crossing import reduce
from ds_npu.features.context_parallel.sharded_batch import CurrentBatch, ShardedBatch
from ds_npu.models.logits import IGNORED_LABEL

SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False, "ForTokenClassification": False}
"""Of transformers' losses that are a mean over tokens: whether token s predicts number s + 1, or itself."""
COUNT = "num_items_in_batch"


def shifts(model: Any) -> bool | None:
    """Whether the loss of ``model`` is made of the next token of each; None for a model without a loss.

    Raises ValueError for a loss that is no mean over tokens, or not known.
    """
    if model.loss_type is None and "labels" not in inspect.signature(model.forward).parameters:
        return None
    # As transformers takes it (modeling_utils.py, PreTrainedModel.loss_function).
    kind = model.loss_type or "ForCausalLM"
    mapping = vars(importlib.import_module("transformers.loss.loss_utils"))["LOSS_MAPPING"]
    name = mapping[kind].__name__ if kind in mapping else str(kind)
    own = vars(model).get("_loss_function")
    # ds_npu's own, put there by a feature before this one, mean the same.
    if name not in SHIFTS or (own is not None and not own.__module__.startswith("ds_npu.")):
        raise ValueError(
            f"{type(model).__name__} has the loss {name if own is None else own}: over the ranks of "
            f"ds_npu.parallel.context only {', '.join(SHIFTS)} of transformers can be divided, which are means over "
            "tokens. What to do: give it no labels, and compute the loss from its logits"
        )
    return SHIFTS[name]


class Targets:
    """What each token of a batch is to predict, [B, S], and how many tokens count."""

    def __init__(self, given: dict[str, Any], shifted: bool) -> None:
        """Of ``shift_labels``, or of ``labels``, in ``given``; ``shifted`` says whether these are of the next token."""
        self.ignored: int = given.get("ignore_index", IGNORED_LABEL)
        self.tokens: torch.Tensor | None = given.get("shift_labels")
        if self.tokens is None and given.get("labels") is not None:
            labels: torch.Tensor = given["labels"]
            # Before they are sharded: the last token of a shard predicts the first of another rank's.
            self.tokens = functional.pad(labels, (0, 1), value=self.ignored)[..., 1:] if shifted else labels
        self.count = given.get(COUNT)
        if self.tokens is not None and self.count is None:
            self.count = (self.tokens != self.ignored).sum()


class LossShare:
    """Stands for the loss function of one model, which calls it in its forward, with whatever labels it has."""

    def __init__(self, usual: Any, current: CurrentBatch, shifted: bool) -> None:
        self.usual, self.current, self.shifted = usual, current, shifted
        self.asked: dict[str, Any] = {}
        self.share: torch.Tensor | None = None
        self.returned: torch.Tensor | None = None
        self.calls = 0

    def expect(self, asked: dict[str, Any]) -> None:
        """The next forward's loss is to be computed with ``asked``, once."""
        self.asked, self.share, self.returned, self.calls = asked, None, None, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.current.sharded is None:
            return self.usual(*args, **kwargs)
        share: torch.Tensor = self.usual(*args, **{**kwargs, **self.asked})
        # The model may add to what it is given, in its place.
        self.calls, self.share, self.returned = self.calls + 1, share, share.clone()
        return self.returned

    def whole(self, loss: torch.Tensor, batch: ShardedBatch, who: str) -> torch.Tensor:
        """The loss of the whole batch, the same on every rank, of which each rank's gradients are its share.

        ``loss`` is what the model made of the share: with the routers' auxiliary loss, which is whole on each rank.
        Raises ValueError where it is made of anything else.
        """
        # Not kept: a graph behind them holds the activations of a whole forward.
        (share, returned), self.share, self.returned = (self.share, self.returned), None, None
        if share is None or self.calls != 1:
            raise ValueError(
                f"{who} called its loss_function {self.calls} times in a forward with labels, so its loss is its own, "
                "and the share of this rank's tokens is not known. What to do: give it no labels, and compute the loss "
                "from its logits"
            )
        whole = reduce(share, batch.group)
        if loss is returned and loss._version == 0:
            return whole
        if not batch.joins_routers:
            raise ValueError(
                f"{who} adds something of its own to the loss of its tokens, which ds_npu.parallel.context cannot "
                "divide over its ranks"
            )
        return whole + (loss - share)
