"""Whole scores of a forward whose head is fused with its loss, as TRL's trainers call every model.

TRL (1.16, ``trainer/utils.py``, ``add_fused_lm_head``) puts a forward of its own into each model that it trains. Called
with ``fused_lm_head=True`` and labels it returns no logits but scores of each target, [B, S] for ``shift_labels`` and
[B, S - 1] for ``labels``, and minus the sum of their log-probabilities, divided by ``num_items_in_batch``. So a rank
that is given the targets of its own tokens and the count of all returns its share of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from ds_npu.comm.crossing import reduce
from ds_npu.features.context_parallel.sharded_batch import ShardedBatch
from ds_npu.features.loss.token_targets import COUNT, LABEL_MASK, LOG_PROBS, Targets

SCORES = (LOG_PROBS, "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", LABEL_MASK)
"""Outputs of one number for each target."""


class TargetScores:
    """The scores of the targets of one batch: what each rank computes of them, and how they are made whole."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """``given``: the arguments of the forward, of the whole batch."""
        self.targets = Targets(given, shifted=True)
        self._has_last = given.get("shift_labels") is not None
        # As TRL does for a batch without targets.
        count = self.targets.count
        self.count = count.clamp(min=1) if isinstance(count, torch.Tensor) else count

    def arguments(self, batch: ShardedBatch) -> dict[str, Any]:
        """The arguments of this rank's forward that stand for labels."""
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
