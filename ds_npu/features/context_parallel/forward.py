"""The forward of a Hugging Face model that takes whole batches and computes this rank's tokens of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ds_npu.features.context_parallel.algorithm_choice import AlgorithmChoice
from ds_npu.features.context_parallel.loss import SCORES, LossShare, TargetScores
from ds_npu.features.context_parallel.sharded_batch import (
    VISIBILITY_ARGUMENTS,
    BatchArguments,
    RunningBatch,
    ShardedBatch,
    UnshardedBatch,
)
from ds_npu.features.loss.model_loss import COUNT, Targets, asks_for_scores
from ds_npu.models.hugging_face_model import HuggingFaceModel, setting
from ds_npu.models.logits import LABEL_ARGUMENTS, guard_shard, likeliest_words
from ds_npu.parallel.context.load_balance import shard_documents, shard_evenly
from ds_npu.parallel.runtime.calls import Keywords
from ds_npu.parallel.runtime.micro_batch import MicroBatch, new_forward
from ds_npu.parallel.tensor.region import RandomNumbers

OF_TOKENS = ("input_ids", "inputs_embeds", "token_type_ids")
"""Arguments [B, S, ...] of which each rank gets its tokens."""
GATHERED = ("logits", "last_hidden_state", "hidden_states")
"""Outputs [B, S, ...] that are gathered."""
OF_ROUTERS = ("router_logits", "aux_loss")
"""Outputs that are whole on each rank where the router logits are gathered."""
ROUTERS = "output_router_logits"
CONTEXT_RANKS = "the ranks of ds_npu.parallel.context"


def generates(given: Keywords) -> bool:
    """Whether a forward with the arguments ``given`` generates: with a cache, or with the last logits of all tokens."""
    asked = given.get("past_key_values") is not None or given.get("use_cache") or given.get("logits_to_keep")
    return not torch.is_grad_enabled() and bool(asked)


class SequenceShardForward:
    """Wraps the forward of ``model``: shards its arguments, runs it, and makes its outputs whole.

    ``owns_positions``: whether the model numbers positions in a way of its own where it is given none.
    """

    def __init__(
        self,
        model: HuggingFaceModel,
        running_batch: RunningBatch,
        choice: AlgorithmChoice,
        random_numbers: RandomNumbers,
        loss: LossShare | None,
        owns_positions: bool,
    ) -> None:
        self.model, self.who, self.running_batch, self.choice = model, type(model).__name__, running_batch, choice
        self.random_numbers, self.loss, self.owns_positions = random_numbers, loss, owns_positions
        self.signature = inspect.signature(model.forward)

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs).arguments
        given = {name: value for name, value in bound.items() if name not in self._collected} | kwargs
        with new_forward() as micro_batch:
            if self.loss is not None:
                self.loss.begin(micro_batch)
            if self._generates(given):
                self.running_batch.set(micro_batch, UnshardedBatch())
                return inner(**given)
            batch, local = self._shard_arguments(given, micro_batch)
            self.running_batch.set(micro_batch, batch)
            as_tuple = local.pop("return_dict", None) is False
            with self.random_numbers():
                out = inner(**local)
            self._finish(out, batch, micro_batch, given)
        return out.to_tuple() if as_tuple else out

    @property
    def _collected(self) -> set[str]:
        """Parameters of the forward that collect others (*args, **kwargs)."""
        several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return {name for name, each in self.signature.parameters.items() if each.kind in several}

    def _generates(self, given: Keywords) -> bool:
        """Whether the call generates tokens one by one: then every rank computes all tokens of the call."""
        if given.get("past_key_values") is not None and torch.is_grad_enabled():
            raise ValueError(
                f"{self.who} is given past_key_values and is trained: ds_npu.parallel.context divides sequences, "
                "which a cache does not have. What to do: leave them out, or generate under torch.no_grad()"
            )
        return generates(given)

    def _shard_arguments(self, given: Keywords, micro_batch: MicroBatch) -> tuple[ShardedBatch, dict[str, Any]]:
        """The batch of the arguments ``given``, and this rank's shards of them.

        Raises ValueError for arguments that cannot be sharded.
        """
        first = next((given[name] for name in OF_TOKENS if given.get(name) is not None), None)
        if first is None:
            raise ValueError(f"{self.who} is given neither input_ids nor inputs_embeds")
        samples = int(first.shape[0])
        length = int(first.shape[1])
        device = first.device
        axis = self.choice.axis
        self._check(given, samples, length)
        shifted = self.loss is None or self.loss.shifted
        targets = Targets(given, shifted)
        visibility = BatchArguments(samples, length, given, targets.tokens, targets.ignored, shifted).visibility()
        tokens = (
            shard_evenly(length, axis.algorithm)
            if visibility.documents is None
            else shard_documents(samples, length, visibility.documents, axis.algorithm)
        )
        positions = self._positions(given, length, device)
        wanted = given.get(ROUTERS)
        routers = bool(setting(self.model.config.get_text_config(), ROUTERS, bool) if wanted is None else wanted)
        batch = ShardedBatch(samples, tokens, axis, device, visibility, positions.max(), routers)
        local = {name: value for name, value in given.items() if name not in VISIBILITY_ARGUMENTS}
        for name in OF_TOKENS:
            if given.get(name) is not None:
                local[name] = batch.shard(given[name])
        # In a model without attention, positions only tell where documents begin.
        local.pop("position_ids", None)
        if "position_ids" in self.signature.parameters:
            local["position_ids"] = batch.shard(positions, positions.dim() - 1)
        if "use_cache" in self.signature.parameters:
            local["use_cache"] = False
        mask = given.get("attention_mask")
        if routers and mask is not None and mask.dim() == 2:
            # The auxiliary loss needs it to leave padding out.
            local["attention_mask"] = mask
        if asks_for_scores(given):
            return batch, local | TargetScores(given).arguments(batch)
        if self.loss is None or targets.tokens is None:
            return batch, local
        mine = batch.shard(targets.tokens)
        self.loss.expect(micro_batch, {COUNT: targets.count} | ({"shift_labels": mine} if self.loss.shifted else {}))
        return batch, local | {name: mine for name in LABEL_ARGUMENTS if given.get(name) is not None}

    def _positions(self, given: Keywords, length: int, device: torch.device) -> torch.Tensor:
        """Positions [..., 1 or B, S]."""
        positions: torch.Tensor | None = given.get("position_ids")
        if positions is None and self.owns_positions:
            raise ValueError(
                f"{self.who} numbers positions in a way of its own where it is given none, and "
                "ds_npu.parallel.context shows it a part of the sequence. What to do: give it position_ids, those of "
                "the whole batch"
            )
        return torch.arange(length, device=device)[None] if positions is None else positions

    def _check(self, given: Keywords, samples: int, length: int) -> None:
        sizes = {"position_ids": (1, samples)} | dict.fromkeys((*OF_TOKENS, *LABEL_ARGUMENTS), (samples,))
        for name, value in given.items():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
            if not tensors or name in VISIBILITY_ARGUMENTS:
                continue
            if name not in sizes:
                raise ValueError(
                    f"{self.who} is given {name} with a tensor {list(tensors[0].shape)}: how it is to be divided over "
                    "the ranks of ds_npu.parallel.context is not known"
                )
            rows, tokens = value.shape[-2:] if name == "position_ids" else value.shape[:2]
            if rows not in sizes[name] or tokens != length:
                raise ValueError(f"{name}: found {list(value.shape)} beside {samples} sequences of {length} tokens")
        if given.get("labels") is not None and self.loss is None:
            raise ValueError(f"{self.who} has no loss, and is given labels")
        if given.get("logits_to_keep"):
            raise ValueError(
                f"logits_to_keep: found {given['logits_to_keep']}; 0 where sequences are divided over the ranks of "
                "ds_npu.parallel.context"
            )

    def _finish(
        self, out: MutableMapping[str, Any], batch: ShardedBatch, micro_batch: MicroBatch, given: Keywords
    ) -> None:
        """Make a loss on labels whole; gather outputs of tokens, or guard them in training on labels."""
        scores = TargetScores(given) if asks_for_scores(given) else None
        if scores is not None:
            weight = setting(self.model.config.get_text_config(), "router_aux_loss_coef", float)
            scores.make_whole(out, batch, weight or 0.0)
        labelled = any(given.get(name) is not None for name in LABEL_ARGUMENTS)
        # Training on labels needs no whole logits, which are large.
        gathers = not (labelled and self.model.training)
        for name, value in list(out.items()):
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if scores is not None and name in ("loss", *SCORES):
                continue
            if name == "loss" and self.loss is not None and labelled:
                out[name] = self.loss.whole(value, micro_batch, batch)
            elif name in GATHERED and not gathers:
                described = f"{name} of all tokens, in training on labels, are sharded over {CONTEXT_RANKS}"
                out[name] = tree_map(partial(_guarded, described=described, batch=batch), value)
            elif name in GATHERED:
                out[name] = tuple(map(batch.gather, value)) if isinstance(value, tuple) else batch.gather(value)
            elif tensors and name not in GATHERED and not (name in OF_ROUTERS and batch.gathers_routers):
                raise ValueError(
                    f"{self.who} returns {name}, and how it is to be joined over the ranks of ds_npu.parallel.context "
                    "is not known"
                )


def _guarded(output: Any, described: str, batch: ShardedBatch) -> Any:
    """A guard on this rank's shard ``output`` of the tokens.

    Tensor parallelism may have guarded it already.
    """
    return guard_shard(output, described, lambda _: batch.gather(likeliest_words(output)))
