"""The forward of a Hugging Face model that takes whole batches and computes this rank's tokens of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ds_npu.features.context_parallel.loss import COUNT, LossShare, Targets
from ds_npu.features.context_parallel.sharded_batch import CurrentBatch, ShardedBatch, UnshardedBatch
from ds_npu.features.context_parallel.visibility import VISIBILITY_ARGUMENTS, BatchArguments
from ds_npu.models.hugging_face_model import HuggingFaceModel, setting
from ds_npu.models.logits import LABEL_ARGUMENTS, guard_shard
from ds_npu.parallel.context.axis import ContextAxis
from ds_npu.parallel.context.load_balance import shard_documents, shard_evenly
from ds_npu.parallel.tensor.region import RandomNumbers

OF_TOKENS = ("input_ids", "inputs_embeds", "token_type_ids")
"""Arguments [B, S, ...] of which each rank gets its tokens."""
GATHERED = ("logits", "last_hidden_state", "hidden_states")
"""Outputs [B, S, ...] that are gathered."""
OF_ROUTERS = ("router_logits", "aux_loss")
"""Outputs that are whole on each rank where the router logits are gathered."""
ROUTERS = "output_router_logits"
CONTEXT_RANKS = "the ranks of ds_npu.parallel.context"


class SequenceShardForward:
    """Wraps the forward of ``model``: shards its arguments, runs it, and makes its outputs whole.

    ``axis_of``: from (samples, tokens of each) to the context axis of a batch. ``owns_positions``: whether the model
    numbers positions in a way of its own where it is given none.
    """

    def __init__(
        self,
        model: HuggingFaceModel,
        current: CurrentBatch,
        axis_of: Callable[[int, int], ContextAxis],
        random_numbers: RandomNumbers,
        loss: LossShare | None,
        owns_positions: bool,
    ) -> None:
        self.model, self.current, self.axis_of, self.random_numbers = model, current, axis_of, random_numbers
        self.loss, self.owns_positions = loss, owns_positions
        self.signature = inspect.signature(model.forward)

    @property
    def who(self) -> str:
        return type(self.model).__name__

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs).arguments
        given = {name: value for name, value in bound.items() if name not in self._collected} | kwargs
        if self._goes_on_with_a_cache(given):
            with self.current.of(UnshardedBatch()):
                return inner(**given)
        batch, local = self.shard_arguments(given)
        # Training on labels needs no whole logits, which are large.
        labelled = any(given.get(name) is not None for name in LABEL_ARGUMENTS)
        as_tuple = local.pop("return_dict", None) is False
        with self.current.of(batch), self.random_numbers():
            out = inner(**local)
        self._finish(out, batch, labelled, gathers=not (labelled and self.model.training))
        return out.to_tuple() if as_tuple else out

    @property
    def _collected(self) -> set[str]:
        """Parameters of the forward that collect others (*args, **kwargs)."""
        several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return {name for name, each in self.signature.parameters.items() if each.kind in several}

    def _goes_on_with_a_cache(self, given: dict[str, Any]) -> bool:
        """Whether the call generates with a cache: tokens come one by one, so every rank computes all of them."""
        cached = given.get("past_key_values") is not None
        if cached and torch.is_grad_enabled():
            raise ValueError(
                f"{self.who} is given past_key_values and is trained: ds_npu.parallel.context divides sequences, "
                "which a cache does not have. What to do: leave them out, or generate under torch.no_grad()"
            )
        return cached or (bool(given.get("use_cache")) and not torch.is_grad_enabled())

    def shard_arguments(self, given: dict[str, Any]) -> tuple[ShardedBatch, dict[str, Any]]:
        """The batch of the arguments ``given``, and this rank's arguments; raises ValueError for one without shards."""
        shape = next((given[name].shape for name in OF_TOKENS if given.get(name) is not None), None)
        if shape is None:
            raise ValueError(f"{self.who} is given neither input_ids nor inputs_embeds")
        samples, length = int(shape[0]), int(shape[1])
        axis = self.axis_of(samples, length)
        self._check(given, samples, length)
        shifted = self.loss is None or self.loss.shifted
        targets = Targets(given, shifted)
        arguments = BatchArguments(samples, length, given, targets.tokens, targets.ignored, shifted)
        visibility = arguments.visibility()
        tokens = (
            shard_evenly(length, axis.algorithm)
            if visibility.documents is None
            else shard_documents(samples, length, visibility.documents, axis.algorithm)
        )
        device = next(given[name].device for name in OF_TOKENS if given.get(name) is not None)
        positions = self._positions(given, length, device)
        routers = self._gathers_routers(given)
        batch = ShardedBatch(samples, tokens, axis, device, visibility, positions.max(), routers)
        local = {name: value for name, value in given.items() if name not in VISIBILITY_ARGUMENTS}
        for name in OF_TOKENS:
            if given.get(name) is not None:
                local[name] = batch.shard(given[name])
        local["position_ids"] = batch.shard(positions, positions.dim() - 1)
        if "use_cache" in self.signature.parameters:
            local["use_cache"] = False
        mask = given.get("attention_mask")
        if routers and mask is not None and mask.dim() == 2:
            # The auxiliary loss needs it to leave padding out.
            local["attention_mask"] = mask
        return batch, local | self._labels(given, targets, batch)

    def _labels(self, given: dict[str, Any], targets: Targets, batch: ShardedBatch) -> dict[str, Any]:
        """This rank's labels under every name that was given; passes them and their count to the loss function."""
        if self.loss is None or targets.tokens is None:
            return {}
        mine = batch.shard(targets.tokens)
        self.loss.expect({COUNT: targets.count} | ({"shift_labels": mine} if self.loss.shifted else {}))
        return {name: mine for name in LABEL_ARGUMENTS if given.get(name) is not None}

    def _positions(self, given: dict[str, Any], length: int, device: torch.device) -> torch.Tensor:
        """Positions [..., 1 or B, S]."""
        positions: torch.Tensor | None = given.get("position_ids")
        if positions is None and self.owns_positions:
            raise ValueError(
                f"{self.who} numbers positions in a way of its own where it is given none, and "
                "ds_npu.parallel.context shows it a part of the sequence. What to do: give it position_ids, those of "
                "the whole batch"
            )
        return torch.arange(length, device=device)[None] if positions is None else positions

    def _gathers_routers(self, given: dict[str, Any]) -> bool:
        wanted = given.get(ROUTERS)
        return bool(setting(self.model.config.get_text_config(), ROUTERS, bool) if wanted is None else wanted)

    def _check(self, given: dict[str, Any], samples: int, length: int) -> None:
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

    def _finish(self, out: MutableMapping[str, Any], batch: ShardedBatch, labelled: bool, gathers: bool) -> None:
        """Make the loss of a forward with labels whole; gather outputs of tokens if ``gathers``, else guard them."""
        for name, value in list(out.items()):
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if name == "loss" and self.loss is not None and labelled:
                out[name] = self.loss.whole(value, batch, self.who)
            elif name in GATHERED and not gathers:
                described = f"{name} of all tokens, in training on labels, are sharded over {CONTEXT_RANKS}"
                out[name] = tree_map(partial(guard_shard, described=described), value)
            elif name in GATHERED:
                out[name] = tuple(map(batch.gather, value)) if isinstance(value, tuple) else batch.gather(value)
            elif tensors and name not in GATHERED and not (name in OF_ROUTERS and batch.gathers_routers):
                raise ValueError(
                    f"{self.who} returns {name}, and how it is to be joined over the ranks of ds_npu.parallel.context "
                    "is not known"
                )
