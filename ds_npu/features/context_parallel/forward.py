"""The forward of a Hugging Face model that is given whole batches and works on this rank's tokens of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ds_npu.features.context_parallel.batch import Batch, Running, WholeBatch
from ds_npu.features.context_parallel.loss import COUNT, LossShare, Targets
from ds_npu.features.context_parallel.visibility import KEYS, Asked
from ds_npu.models.attention import setting
from ds_npu.parallel.context.axis import ContextAxis
from ds_npu.parallel.context.load_balance import shard_documents, shard_evenly
from ds_npu.parallel.tensor.shard_access import Shard, ShardCopy

EVERY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids")
"""[B, S, ...], divided as they are."""
LABELS = ("labels", "shift_labels")
JOINED = ("logits", "last_hidden_state", "hidden_states")
"""[B, S, ...] of the output."""
WHOLE = ("router_logits", "aux_loss")
"""Of the output, what is whole on each rank where the routers' logits are joined."""
REMEDY = "call the model without labels, or under model.eval(): they are whole then"
ROUTERS = "output_router_logits"


class SplitForward:
    """What is put around the forward of ``model``.

    ``axis_of`` the samples and tokens of a batch is the axis that it is over; ``owns_positions`` says whether the model
    makes positions of its own where it is given none.
    """

    def __init__(
        self,
        model: Any,
        running: Running,
        axis_of: Callable[[int, int], ContextAxis],
        random_numbers: Callable[[], AbstractContextManager[Any]],
        loss: LossShare | None,
        owns_positions: bool,
    ) -> None:
        self.model, self.running, self.axis_of, self.random_numbers = model, running, axis_of, random_numbers
        self.loss, self.owns_positions = loss, owns_positions
        self.signature = inspect.signature(model.forward)

    @property
    def who(self) -> str:
        return type(self.model).__name__

    def __call__(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs).arguments
        given = {name: value for name, value in bound.items() if name not in self._collected} | kwargs
        if self._goes_on_with_a_cache(given):
            with self.running.of(WholeBatch()):
                return inner(**given)
        batch, local = self.divided(given)
        # What is trained on labels needs none of its logits whole, and they are large.
        labelled = any(given.get(name) is not None for name in LABELS)
        as_tuple = local.pop("return_dict", None) is False
        with self.running.of(batch), self.random_numbers():
            out = inner(**local)
        self._finish(out, batch, labelled, joins=not (labelled and self.model.training))
        return out.to_tuple() if as_tuple else out

    @property
    def _collected(self) -> set[str]:
        """Parameters that collect others."""
        several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return {name for name, each in self.signature.parameters.items() if each.kind in several}

    def _goes_on_with_a_cache(self, given: dict[str, Any]) -> bool:
        """Whether this is generation: tokens come one by one, so every rank computes them all."""
        cached = given.get("past_key_values") is not None
        if cached and torch.is_grad_enabled():
            raise ValueError(
                f"{self.who} is given past_key_values and is trained: ds_npu.parallel.context divides sequences, "
                "which a cache does not have. What to do: leave them out, or generate under torch.no_grad()"
            )
        return cached or (bool(given.get("use_cache")) and not torch.is_grad_enabled())

    def divided(self, given: dict[str, Any]) -> tuple[Batch, dict[str, Any]]:
        """The batch that ``given`` is, and this rank's part of it; raises ValueError, naming it, for what has none."""
        shape = next((given[name].shape for name in EVERY_TOKEN if given.get(name) is not None), None)
        if shape is None:
            raise ValueError(f"{self.who} is given neither input_ids nor inputs_embeds")
        samples, length = int(shape[0]), int(shape[1])
        axis = self.axis_of(samples, length)
        self._check(given, samples, length)
        shifted = self.loss is None or self.loss.shifted
        targets = Targets(given, shifted)
        asked = Asked(samples, length, given, targets.tokens, targets.ignored, shifted)
        visibility = asked.visibility()
        tokens = (
            shard_evenly(length, axis.algorithm)
            if visibility.documents is None
            else shard_documents(samples, length, visibility.documents, axis.algorithm)
        )
        device = next(given[name].device for name in EVERY_TOKEN if given.get(name) is not None)
        positions = self._positions(given, length, device)
        routers = self._joins_routers(given)
        batch = Batch(samples, tokens, axis, device, visibility, positions.max(), routers)
        local = {name: value for name, value in given.items() if name not in KEYS}
        for name in EVERY_TOKEN:
            if given.get(name) is not None:
                local[name] = batch.take(given[name])
        local["position_ids"] = batch.take(positions, positions.dim() - 1)
        if "use_cache" in self.signature.parameters:
            local["use_cache"] = False
        mask = given.get("attention_mask")
        if routers and mask is not None and mask.dim() == 2:
            # The auxiliary loss leaves padding out.
            local["attention_mask"] = mask
        return batch, local | self._labels(given, targets, batch)

    def _labels(self, given: dict[str, Any], targets: Targets, batch: Batch) -> dict[str, Any]:
        """This rank's targets, under every name that the model may look for; tells the loss what it is made of."""
        if self.loss is None or targets.tokens is None:
            return {}
        mine = batch.take(targets.tokens)
        self.loss.expect({COUNT: targets.count} | ({"shift_labels": mine} if self.loss.shifted else {}))
        return {name: mine for name in LABELS if given.get(name) is not None}

    def _positions(self, given: dict[str, Any], length: int, device: torch.device) -> torch.Tensor:
        """[..., 1 or B, S]."""
        positions: torch.Tensor | None = given.get("position_ids")
        if positions is None and self.owns_positions:
            raise ValueError(
                f"{self.who} numbers positions in a way of its own where it is given none, and "
                "ds_npu.parallel.context shows it a part of the sequence. What to do: give it position_ids, those of "
                "the whole batch"
            )
        return torch.arange(length, device=device)[None] if positions is None else positions

    def _joins_routers(self, given: dict[str, Any]) -> bool:
        asked = given.get(ROUTERS)
        return bool(setting(self.model.config.get_text_config(), ROUTERS) if asked is None else asked)

    def _check(self, given: dict[str, Any], samples: int, length: int) -> None:
        sizes = {"position_ids": (1, samples)} | dict.fromkeys((*EVERY_TOKEN, *LABELS), (samples,))
        for name, value in given.items():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
            if not tensors or name in KEYS:
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

    def _finish(self, out: Any, batch: Batch, labelled: bool, joins: bool) -> None:
        """Make what is returned whole: the loss of a forward with labels, and, if it ``joins``, what is of tokens."""
        for name, value in list(out.items()):
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if name == "loss" and self.loss is not None and labelled:
                out[name] = self.loss.whole(value, batch, self.who)
            elif name in JOINED and not joins:
                out[name] = tree_map(lambda part, name=name: _guarded(part, name), value)
            elif name in JOINED:
                out[name] = tuple(map(batch.join, value)) if isinstance(value, tuple) else batch.join(value)
            elif tensors and name not in JOINED and not (name in WHOLE and batch.joins_routers):
                raise ValueError(
                    f"{self.who} returns {name}, and how it is to be joined over the ranks of ds_npu.parallel.context "
                    "is not known"
                )


def _guarded(part: Any, name: str) -> Any:
    """Let nobody take what this rank returns of its tokens for that of all of them."""
    if not isinstance(part, torch.Tensor):
        return part
    described = f"{name} of all tokens, in training on labels, are split over the ranks of ds_npu.parallel.context"
    return ShardCopy.of(part, Shard(described, REMEDY))
