"""Replacements for names of TRL: tokens' scores with a sharded head, and samples of generated completions.

Read in TRL 1.16. Its trainers call a model with ``fused_lm_head=True``, and the forward that they put into it reads the
head's weight and computes log-probabilities with it (``trainer/utils.py``, ``add_fused_lm_head``). GRPOTrainer and
RLOOTrainer count samples, gather rewards and take each process's part of them, as if every process were a data rank.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch

from ds_npu.engine.clients.accelerate import Function, degrees_of, showing_data_ranks
from ds_npu.parallel.tensor.log_probs import LogitTransform, TokenScores, VocabParallelLogProbs
from ds_npu.parallel.tensor.shard_access import ranks_agree
from ds_npu.parallel.tensor.whole_weight import WholeWeight


def log_probs_of_shards(original: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """For TRL's function of hidden states [T, H] and the head's weight, which is read as the whole [words, H].

    Where tensor ranks hold shards of that weight and all call it, each computes with its own words: no weight is
    gathered, and no rank does the work of another.
    """
    signature = inspect.signature(original.forward)

    class LogProbs(original):  # type: ignore[misc, valid-type]
        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(None, *args, **kwargs)
            given.apply_defaults()
            values = given.arguments
            scores = _scores(values)
            if scores is None:
                return super().apply(*args, **kwargs)
            # In TRL's dtype, which is float32 for float64 inputs, too.
            wide = TokenScores(*(each if each.dtype == torch.bool else each.float() for each in scores))
            asked = ("log_probs", *values["outputs"])
            return tuple(each if name in asked else None for name, each in zip(wide._fields, wide, strict=True))

    return LogProbs


def _scores(values: dict[str, Any]) -> TokenScores | None:
    """The scores, where the head is sharded by its words and every tensor rank computes the same."""
    weight, bias = values["weight"], values["bias"]
    sharded = [each for each in (weight, bias) if isinstance(each, WholeWeight)]
    kept_whole = len(sharded) < (1 if bias is None else 2)
    if kept_whole or not ranks_agree() or any(each.shard.sharding.dim != 0 for each in sharded):
        return None
    shard = weight.shard
    assert shard.group is not None
    transform = LogitTransform(values["logit_scale"], values["final_logit_softcapping"], values["temperature"])
    head = VocabParallelLogProbs(shard.group, shard.sharding, transform)
    return head(values["hidden"], weight.parameter, values["targets"], None if bias is None else bias.parameter)


_COUNTING: ContextVar[ExitStack | None] = ContextVar("_COUNTING", default=None)
"""An exit stack while a trainer's arguments are made: ``know_data_ranks`` lets them count data ranks until its end."""


def count_generated_samples(original: Function) -> Function:
    """For the arguments of a trainer that generates: the batch of completions is that of the data ranks."""

    @functools.wraps(original)
    def counted(self: Any) -> None:
        with ExitStack() as stack:
            token = _COUNTING.set(stack)
            stack.callback(_COUNTING.reset, token)
            original(self)

    return counted


def know_data_ranks(original: Function) -> Function:
    """For ``TrainingArguments.__post_init__``, after which the config and the processes are known.

    From then on trainers' arguments count data ranks.
    """

    @functools.wraps(original)
    def known(self: Any) -> None:
        original(self)
        stack = _COUNTING.get()
        config = self.hf_deepspeed_config
        state = self.distributed_state
        degrees = None if stack is None or config is None else degrees_of(config.config, state)
        if stack is not None and degrees is not None:
            stack.enter_context(showing_data_ranks(degrees, [state]))

    return known
