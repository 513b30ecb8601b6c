"""Replacements for names of ms-swift: its sampler counts every process as a data rank, its metric reads logits.

Read in ms-swift 4.6.0.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from ds_npu.engine.clients.accelerate import Function, data_rank_of, sharing_degrees
from ds_npu.parallel.tensor.shard_access import ShardCopy


def sampler_of_data_ranks(original: type) -> type:
    """For its sampler of batches: ``rank`` and ``world_size`` are those of the data ranks."""

    class BatchSamplerShard(original):  # type: ignore[misc]
        @property
        def rank(self) -> Any:
            degrees = sharing_degrees()
            return super().rank if degrees is None else data_rank_of(degrees)

        @property
        def world_size(self) -> Any:
            degrees = sharing_degrees()
            return super().world_size if degrees is None else degrees.dp

    return BatchSamplerShard


def keep_all_logits(original: Function) -> Function:
    """For the method that lets a forward return the logits of the last tokens only: not over context ranks."""

    @functools.wraps(original)
    def chosen(self: Any, default_value: bool = True) -> Any:
        degrees = sharing_degrees()
        return original(self, default_value and (degrees is None or degrees.cp == 1))

    return chosen


def accuracy_of_sharded_logits(original: Function) -> Function:
    """For the method that counts right tokens in each forward: of sharded logits it gets the likeliest words."""

    @functools.wraps(original)
    def counted(self: Any, outputs: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(outputs.logits, ShardCopy):
            return original(self, outputs, labels, *args, **kwargs)
        from ds_npu.models.logits import likeliest_words

        words = likeliest_words(outputs.logits)
        # The accuracy of tokens uses only argmax of the logits.
        found = SimpleNamespace(logits=SimpleNamespace(argmax=lambda dim: words))
        return original(self, found, labels, *args, **kwargs)

    return counted
