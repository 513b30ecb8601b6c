"""transformers' two functions of attention, for one model whose sequences are sharded over the context ranks."""

from __future__ import annotations

import itertools
from typing import Any, NoReturn

import torch
from torch import nn

from ds_npu.features.context_parallel.sharded_batch import CurrentBatch, SequenceShardMask, ShardedBatch, UnshardedBatch
from ds_npu.features.context_parallel.value_exchange import ValueExchangeOverlap
from ds_npu.models import attention_mask as masks
from ds_npu.models.attention_function import (
    Implementation,
    attention_function,
    in_autocast_dtype,
    mask_of_module,
    refuse_unknown,
)
from ds_npu.ops.attention import Mask, Options
from ds_npu.parallel.context.attention import context_attention

_numbers = itertools.count()


class SequenceShardAttention:
    """What the attention modules of one model call; ``current`` says of which batch their tokens are."""

    def __init__(self, current: CurrentBatch, values: ValueExchangeOverlap) -> None:
        self.current, self.values = current, values
        self.name = f"ds_npu_context_{next(_numbers)}"
        self.waiting: dict[nn.Module, str] = {}
        """Attentions of the model, and their names, that have not called ``attend`` in the first forward yet."""

    @property
    def implementation(self) -> Implementation:
        """For ``use_attention``."""
        return Implementation(self.name, self.attend, self.mask)

    def mask(self, **asked: Any) -> Any:
        """The mask function (see ``attention_mask.attention_mask``).

        The documents that transformers has found in this rank's positions are not there: the batch has the real ones.
        Raises ValueError for what is no band, for it cannot be evaluated on a part of the sequence.
        """
        batch = self.current.expected("an attention mask")
        if isinstance(batch, UnshardedBatch):
            return masks.attention_mask(**asked)
        keys, offsets = asked["kv_length"], (asked.get("q_offset", 0), asked.get("kv_offset", 0))
        # Not compared with numbers on the device: those of a static cache.
        here = not any(isinstance(offset, torch.Tensor) for offset in offsets) and offsets == (0, 0)
        if not here or asked["q_length"] != batch.count or keys not in (batch.count, batch.tokens.length):
            _refuse(f"a mask of {asked['q_length']} rows and {keys} keys at {offsets}", f"{batch.count} tokens alone")
        if batch.visibility.dense is not None:
            return SequenceShardMask(Mask(dense=batch.visibility.dense), batch)
        pattern = masks.pattern_of(asked["mask_function"])
        may_leave_out = asked.get("allow_is_causal_skip", True) or asked.get("allow_is_bidirectional_skip", False)
        if pattern is None or (pattern.documents is None and not may_leave_out):
            _refuse(f"a mask made by {asked['mask_function'].__qualname__}", "full, causal and sliding-window masks")
        if pattern.is_empty:
            return SequenceShardMask(Mask(dense=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.device)), batch)
        return SequenceShardMask(_with_padding(Mask(pattern.before, pattern.after), batch), batch)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **asked: Any,
    ) -> tuple[torch.Tensor, None]:
        """The attention function (see ``attention_function``): [B, N, S, D] of this rank's tokens."""
        self.waiting.pop(module, None)
        batch = (
            attention_mask.batch
            if isinstance(attention_mask, SequenceShardMask)
            else self.current.expected("attention")
        )
        if isinstance(batch, UnshardedBatch):
            return attention_function(module, query, key, value, attention_mask, **asked)
        refuse_unknown(module, asked)
        who = type(module).__name__
        if isinstance(attention_mask, torch.Tensor):
            _refuse(f"a mask {list(attention_mask.shape)} that {who} made itself", "masks of transformers' functions")
        if {query.shape[2], key.shape[2]} != {batch.count}:
            _refuse(
                f"{query.shape[2]} rows and {key.shape[2]} keys in {who}", f"{batch.count}, the tokens of this rank"
            )
        own = isinstance(attention_mask, SequenceShardMask)
        mask = attention_mask.mask if own else _with_padding(mask_of_module(module, asked), batch)
        q, k, v = (x.transpose(1, 2) for x in in_autocast_dtype(query, key, value))
        options = Options("BSND", mask, asked.get("scaling"), asked.get("dropout") or 0.0)
        return context_attention(q, k, self.values.of(module, v), batch.axis, options, batch.tokens), None

    def check_all_called(self) -> None:
        """Raise ValueError where an attention has computed something of its own instead."""
        if self.waiting:
            name = next(iter(self.waiting.values()))
            _refuse(
                f"a forward in which {len(self.waiting)} attentions, as {name}, did not call transformers' function",
                "sequences by the attentions that do",
            )


def _with_padding(band: Mask, batch: ShardedBatch) -> Mask:
    """``band``, or, where padding has holes, a mask of the whole sequence."""
    padding, length = batch.visibility.padding, batch.tokens.length
    if batch.visibility.dense is not None:
        return Mask(dense=batch.visibility.dense)
    if padding is None:
        return band
    outside = band.band(length, length).hidden(range(length), range(length), padding.device)
    hidden = padding[:, None, None, :].expand(-1, -1, length, -1)
    return Mask(dense=hidden if outside is None else hidden | outside)


def _refuse(found: str, accepted: str) -> NoReturn:
    raise ValueError(f"ds_npu.parallel.context: found {found}; its ranks compute attention over {accepted}")
