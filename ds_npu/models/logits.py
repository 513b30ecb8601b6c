"""Labels and logits of Hugging Face models: their names, and guards for logits that are a shard or do not exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from ds_npu.parallel.runtime.calls import Arguments, Keywords, Operation
from ds_npu.parallel.tensor.shard_access import (
    Shard,
    ShardCopy,
    is_metadata,
    local_shard,
)

LABEL_ARGUMENTS = ("labels", "shift_labels")
"""Arguments of a forward with labels; a model that is trained on them needs no whole logits."""
IGNORED_LABEL = -100
"""transformers' label of a token without a target."""
REMEDY = "call the model without labels, or under model.eval(): they are whole then"

T = TypeVar("T")
L = TypeVar("L", bound="AbsentLogits")
Likeliest = Callable[[torch.Tensor], torch.Tensor]
"""Returns the likeliest word of every token for a rank's shard of logits."""


@dataclass(frozen=True)
class LogitsShard(Shard):
    """The whole logits, of which a ShardCopy is one rank's shard."""

    likeliest: Likeliest


class LogitsAccessError(RuntimeError):
    """Other code computes with logits that do not exist."""


def _no_values(
    cls: type, func: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
) -> NoReturn:
    absent = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, AbsentLogits))
    raise LogitsAccessError(f"{absent.described} Read here: {func.__name__}")


class AbsentLogits(torch.Tensor):
    """Logits that are never computed as a whole: a shape, dtype and device, and an error for all that reads values."""

    described: str

    @classmethod
    def like(cls: type[L], shape: Sequence[int], dtype: torch.dtype, device: torch.device, described: str) -> L:
        """``described``: whose logits do not exist, why, and what to do, for the error."""
        make: Callable[..., L] = torch.Tensor._make_wrapper_subclass
        made = make(cls, shape, dtype=dtype, device=device)
        made.described = described
        return made

    @classmethod
    def __torch_function__(
        cls, func: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            own = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, AbsentLogits))
            if is_metadata(func):
                return func(*args, **(kwargs or {}))
            if func is torch.Tensor.detach:  # ZeRO-3 does so to all that a module returns.
                return AbsentLogits.like(own.shape, own.dtype, own.device, own.described)
            if func is torch.Tensor.__repr__:
                return f"AbsentLogits({list(own.shape)}: {own.described})"
            _no_values(cls, func, types, args, kwargs)

    __torch_dispatch__: Any = classmethod(_no_values)


def guard_shard(output: T, described: str, likeliest: Likeliest) -> T | ShardCopy:
    """Make an ``output`` that is a tensor raise ShardAccessError where somebody computes with it.

    It is this rank's shard, and nobody may take it for the whole. ``described`` says in the error what is sharded over
    which ranks. An ``output`` of another kind, and logits that do not exist, are returned as they are.
    """
    if not isinstance(output, torch.Tensor) or isinstance(output, AbsentLogits):
        return output
    return ShardCopy.of(output, LogitsShard(described, REMEDY, likeliest))


def likeliest_words(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest word of each token, int64 [B, S], of logits [B, S, V] that may be guarded.

    Where each rank holds a shard of them, every rank that shares the samples calls it.
    """
    shard = logits.shard if isinstance(logits, ShardCopy) else None
    return shard.likeliest(local_shard(logits)) if isinstance(shard, LogitsShard) else logits.argmax(-1)
