"""transformers' attention and mask functions, for one model whose sequences are sharded over the context ranks."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from ds_npu.features.context_parallel.sharded_batch import RunningBatch, SequenceShardMask, ShardedBatch, UnshardedBatch
from ds_npu.features.context_parallel.value_exchange import ValueExchangeOverlap
from ds_npu.models import attention_mask as masks
from ds_npu.models.attention_function import (
    Implementation,
    attention_function,
    in_autocast_dtype,
    mask_of_module,
    options_of,
    refuse_unknown,
)
from ds_npu.models.attention_mask import PackedMask
from ds_npu.ops.attention import Mask
from ds_npu.parallel.context.attention import context_attention
from ds_npu.parallel.runtime.forward_wraps import P, R

_numbers = itertools.count()


class SequenceShardAttention:
    """The attention and mask functions of one model; ``running_batch`` tells which tokens they are given."""

    def __init__(self, running_batch: RunningBatch, values: ValueExchangeOverlap) -> None:
        self.running_batch, self.values = running_batch, values
        self.name = f"ds_npu_context_{next(_numbers)}"
        self.not_called: dict[nn.Module, str] = {}
        """Attentions of the model, with their names, that have not called ``attend`` since the first forward began."""

    def implementation(self) -> Implementation:
        """The entry of transformers' registries: they keep it as long as the process lives, and not the model."""
        owner = weakref.ref(self)

        def attend(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
            return _there(owner()).attend(*args, **kwargs)

        def mask(**arguments: Any) -> torch.Tensor | Mask | PackedMask | SequenceShardMask | None:
            return _there(owner()).mask(**arguments)

        return Implementation(self.name, attend, mask)

    def mask(self, **arguments: Any) -> torch.Tensor | Mask | PackedMask | SequenceShardMask | None:
        """The mask function (see ``attention_mask.attention_mask``).

        Documents that transformers found in this rank's positions are ignored: the batch has those of whole sequences.
        Raises ValueError for a mask that is no band, which cannot be evaluated on a shard of the sequence.
        """
        batch = self.running_batch.require("an attention mask")
        if isinstance(batch, UnshardedBatch):
            return masks.attention_mask(**arguments)
        keys = arguments["kv_length"]
        offsets = (arguments.get("q_offset", 0), arguments.get("kv_offset", 0))
        # A static cache's offsets are on the device, which the host does not wait for.
        here = not any(isinstance(offset, torch.Tensor) for offset in offsets) and offsets == (0, 0)
        if not here or arguments["q_length"] != batch.count or keys not in (batch.count, batch.tokens.length):
            _refuse(
                f"a mask of {arguments['q_length']} rows and {keys} keys at {offsets}", f"{batch.count} tokens alone"
            )
        if batch.visibility.dense is not None:
            return SequenceShardMask(Mask(dense=batch.visibility.dense), batch)
        pattern = masks.pattern_of(arguments["mask_function"])
        may_leave_out = arguments.get("allow_is_causal_skip", True) or arguments.get(
            "allow_is_bidirectional_skip", False
        )
        if pattern is None or (pattern.documents is None and not may_leave_out):
            _refuse(
                f"a mask made by {arguments['mask_function'].__qualname__}", "full, causal and sliding-window masks"
            )
        if pattern.is_empty:
            return SequenceShardMask(Mask(dense=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.device)), batch)
        if pattern.chunk is not None:
            return SequenceShardMask(_in_chunks(pattern, pattern.chunk, batch), batch)
        return SequenceShardMask(_with_padding(Mask(pattern.before, pattern.after), batch), batch)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | Mask | PackedMask | SequenceShardMask | None = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        """The attention function (see ``attention_function``) of this rank's tokens: [B, N, S / cp, D]."""
        self.not_called.pop(module, None)
        if isinstance(attention_mask, SequenceShardMask):
            batch = attention_mask.batch
            given = attention_mask.mask
        else:
            found = self.running_batch.require("attention")
            if isinstance(found, UnshardedBatch):
                return attention_function(module, query, key, value, attention_mask, **arguments)
            batch, given = found, None
        refuse_unknown(module, arguments)
        who = type(module).__name__
        if isinstance(attention_mask, torch.Tensor):
            _refuse(f"a mask {list(attention_mask.shape)} that {who} made itself", "masks of transformers' functions")
        if {query.shape[2], key.shape[2]} != {batch.count}:
            _refuse(
                f"{query.shape[2]} rows and {key.shape[2]} keys in {who}", f"{batch.count}, the tokens of this rank"
            )
        mask = _with_padding(mask_of_module(module, arguments), batch) if given is None else given
        q, k, v = (x.transpose(1, 2) for x in in_autocast_dtype(query, key, value))
        options = options_of(arguments, "BSND", mask)
        return context_attention(q, k, self.values.of(module, v), batch.axis, options, batch.tokens), None

    def checked(self, model: nn.Module, forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Wrap the forward of ``model``: raise ValueError where an attention has computed without ``attend``."""
        out = forward(*args, **kwargs)
        # Only one of several pipeline stages has run.
        present = set(model.modules()) if self.not_called else ()
        missed = [name for module, name in self.not_called.items() if module in present]
        if missed:
            _refuse(
                f"a forward in which {len(missed)} attentions, as {missed[0]}, did not call transformers' function",
                "sequences by the attentions that do",
            )
        return out


def _there(found: SequenceShardAttention | None) -> SequenceShardAttention:
    if found is None:
        raise RuntimeError("attention over context ranks: called for a model that is gone")
    return found


def _with_padding(band: Mask, batch: ShardedBatch) -> Mask:
    """``band`` and the padding: a mask of the whole sequence where no documents express the padding."""
    padding = batch.visibility.padding
    length = batch.tokens.length
    if batch.visibility.dense is not None:
        return Mask(dense=batch.visibility.dense)
    if padding is None:
        return band
    outside = band.band(length, length).hidden(range(length), range(length), padding.device)
    hidden = padding[:, None, None, :].expand(-1, -1, length, -1)
    return Mask(dense=hidden if outside is None else hidden | outside)


def _in_chunks(pattern: masks.Pattern, size: int, batch: ShardedBatch) -> Mask:
    """A mask of the whole sequence [B or 1, 1, S, S], in which rows see only keys of their own chunk of ``size``."""
    padding = batch.visibility.padding
    length = batch.tokens.length
    device = batch.device
    if batch.visibility.documents is not None:
        _refuse("packed documents, or padding at the ends of samples, in chunked attention", "samples without padding")
    band = _with_padding(Mask(pattern.before, pattern.after), batch)
    hidden = band.dense
    if hidden is None:
        outside = band.band(length, length).hidden(range(length), range(length), device)
        hidden = torch.zeros(1, 1, length, length, dtype=torch.bool, device=device) if outside is None else outside
    at = torch.arange(length, device=device)[None]
    at = at if padding is None else at - padding.int().cumprod(1).sum(1, keepdim=True)
    chunks = at.div(size, rounding_mode="floor")
    return Mask(dense=hidden | (chunks[:, None, :, None] != chunks[:, None, None, :]))


def _refuse(found: str, accepted: str) -> NoReturn:
    raise ValueError(f"ds_npu.parallel.context: found {found}; its ranks compute attention over {accepted}")
