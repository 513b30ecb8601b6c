"""The loss of a Hugging Face model whose sequences are sharded over the context ranks.

Each rank's share is the sum over its tokens divided by the number of labelled tokens of the whole batch. So shares add
up to the loss of one process, wherever tokens, padding and documents fall.

TRL (1.16, ``trainer/utils.py``, ``add_fused_lm_head``) puts a forward of its own into each model that it trains. Called
with ``fused_lm_head=True`` and labels it returns no logits but scores of each target, [B, S] for ``shift_labels`` and
[B, S - 1] for ``labels``, and minus the sum of their log-probabilities, divided by ``num_items_in_batch``. So a rank
that is given the targets of its own tokens and the count of all returns its share of the loss.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from ds_npu.comm.crossing import reduce
from ds_npu.features.context_parallel.sharded_batch import ShardedBatch
from ds_npu.features.loss.model_loss import COUNT, LABEL_MASK, LOG_PROBS, LossFunction, LossLevel, Targets, wrap_loss
from ds_npu.models.hugging_face_model import HuggingFaceModel
from ds_npu.parallel.runtime.calls import Keywords
from ds_npu.parallel.runtime.micro_batch import Fact, MicroBatch, running

DIVIDED_BY = ("ds_npu.parallel.context", "give it no labels, and compute the loss from its logits")
"""The key that divides the loss over ranks, and the remedy where that is not possible."""

SCORES = (LOG_PROBS, "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", LABEL_MASK)
"""Outputs of one number for each target."""


class LossShare:
    """A link of the loss of ``model``: this rank's share, with the labels of this rank's tokens."""

    def __init__(self, model: HuggingFaceModel, shifted: bool) -> None:
        self.model, self.shifted = model, shifted
        self._arguments: Fact[Keywords | None] = Fact(while_running=True)
        self.loss = wrap_loss(model, self._link, LossLevel.SHARE, "parallel.context")

    def begin(self, micro_batch: MicroBatch) -> None:
        """Begin a forward; its loss is a share only after a call of ``expect``."""
        self.loss.watch(micro_batch)
        self._arguments.set(micro_batch, None)

    def expect(self, micro_batch: MicroBatch, arguments: Keywords) -> None:
        """Override these arguments of the loss function in the forward that begins, which must call it once.

        Raises ValueError where the loss function of the model is not the one with this link any more.
        """
        self.loss.check_not_replaced(self.model)
        self._arguments.set(micro_batch, arguments)

    def _link(self, inner: LossFunction, *args: Any, **kwargs: Any) -> torch.Tensor:
        return inner(*args, **{**kwargs, **(self._arguments.of(running()) or {})})

    def whole(self, loss: torch.Tensor, micro_batch: MicroBatch, batch: ShardedBatch) -> torch.Tensor:
        """The loss of the whole batch, the same on every rank; in backward each rank gets the gradient of its share.

        ``loss`` is what the model made of the share: it may add the routers' auxiliary loss, which is whole on each
        rank. Raises ValueError where it made anything else of it.
        """
        run = self.loss.run_of(micro_batch)
        who = type(self.model).__name__
        if run.computed is None or run.calls != 1:
            raise ValueError(
                f"{who} called its loss_function {run.calls} times in a forward with labels, so its loss is its own, "
                "and the share of this rank's tokens is not known. What to do: give it no labels, and compute the loss "
                "from its logits"
            )
        whole = reduce(run.computed, batch.group)
        added = run.added(loss)
        if added is None:
            return whole
        if not batch.gathers_routers:
            raise ValueError(
                f"{who} adds something of its own to the loss of its tokens, which ds_npu.parallel.context cannot "
                "divide over its ranks"
            )
        return whole + added


class TargetScores:
    """The scores of the targets of one batch: what each rank computes of them, and how they are made whole."""

    def __init__(self, given: Keywords) -> None:
        """``given``: the arguments of the forward, of the whole batch."""
        self.targets = Targets(given, shifted=True)
        self._has_last = given.get("shift_labels") is not None
        # As TRL does for a batch without targets.
        count = self.targets.count
        self.count = count.clamp(min=1) if isinstance(count, torch.Tensor) else count

    def arguments(self, batch: ShardedBatch) -> dict[str, Any]:
        """The arguments that replace the labels in this rank's forward."""
        assert self.targets.tokens is not None
        return {"labels": None, "shift_labels": batch.shard(self.targets.tokens), COUNT: self.count}

    def make_whole(self, out: MutableMapping[str, Any], batch: ShardedBatch, aux_weight: float) -> None:
        """Replace this rank's scores in ``out`` by those of all tokens, and its share of the loss by the loss.

        ``aux_weight``: of the routers' auxiliary loss, which is whole on each rank. The same on every rank; in backward
        each rank keeps the gradients of its own tokens. One all-gather and one all-reduce.
        """
        loss = reduce(-out[LOG_PROBS].sum() / self.count, batch.group)
        aux = out.get("aux_loss")
        out["loss"] = loss if aux is None else loss + aux_weight * aux
        scores = {name: out[name] for name in SCORES if out.get(name) is not None}
        dtype = scores[LOG_PROBS].dtype
        whole = batch.gather(torch.stack([each.to(dtype) for each in scores.values()], dim=-1))
        for (name, mine), each in zip(scores.items(), whole.unbind(-1), strict=True):
            found = each if self._has_last else each[:, :-1]
            out[name] = (found if mine.requires_grad else found.detach()).to(mine.dtype)
