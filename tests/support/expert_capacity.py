"""Capacity in one process: a loop over tokens, on the same pieces of a batch as the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import contextmanager
from unittest import mock

import expert_rule
import tensor_parallel_rule as dense
import tiny_models
import torch
from gradient_rule import MICRO
from torch import nn

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.parallel.context.load_balance import shard_evenly

Pieces = Sequence[Sequence[int]]
"""The tokens, of those of a micro-batch, that each rank has."""


def limited(ids: torch.Tensor, weights: torch.Tensor, capacity: int, policy: str) -> torch.Tensor:
    """``ids`` with -1 for what is beyond the capacity, expert by expert."""
    kept = ids.clone()
    for expert in set(ids.flatten().tolist()) - {-1}:
        who = [(token, choice) for token, choice in (ids == expert).nonzero().tolist()]
        if policy == "probs":
            who.sort(key=lambda each: -float(weights[each]))
        for each in who[capacity:]:
            kept[each] = -1
    return kept


def limit(model: nn.Module, factor: float, policy: str, pieces: Pieces) -> None:
    """Make the experts of ``model``, a plain one, leave out what each of the ``pieces`` drops."""
    found = [module for name, module in model.named_modules() if name.endswith(".experts")]
    assert found
    for module in found:
        module.forward = limited_forward(module.forward, len(module.down_proj), (factor, policy, pieces))


def limit_scores(model: nn.Module, factor: float, policy: str, pieces: Pieces) -> None:
    """As ``limit``, of a plain Llama-4: the score of a choice that is dropped is 0, and so is the expert's input."""
    for router in [module for name, module in model.named_modules() if name.endswith(".router")]:

        def scored(x, forward=router.forward, k=router.top_k):
            scores, logits = forward(x)
            chosen = scores.topk(k, dim=1)
            experts = limited_forward(lambda x, ids, kept: kept, scores.shape[1], (factor, policy, pieces))
            kept = torch.zeros_like(scores).scatter(1, chosen.indices, (experts(x, *chosen[::-1]) > 0).to(scores))
            return scores * kept, logits

        router.forward = scored


def limited_forward(forward, experts: int, of: tuple[float, str, Pieces]):
    factor, policy, pieces = of

    def run(x, ids, weights):
        kept = torch.ones_like(weights)
        assert sorted(each for piece in pieces for each in piece) == list(range(len(ids)))
        for piece in map(list, pieces):
            capacity = math.ceil(len(piece) * ids.shape[1] / experts * factor)
            kept[piece] = (limited(ids[piece], weights[piece], capacity, policy) >= 0).to(weights)
        assert not kept.all(), "nothing is dropped"
        # A choice that weighs nothing adds nothing, and has no gradient.
        return forward(x, ids, weights * kept)

    return run


@contextmanager
def limited_reference(factor: float, policy: str, pieces: Pieces):
    """The process that ``tensor_parallel_rule`` compares with drops within the block."""
    reference, made = dense.reference, tiny_models.tiny

    def tiny(*args, **kwargs):
        model = made(*args, **kwargs)
        (limit_scores if args[0] == "llama4_text" else limit)(model, factor, policy, pieces)
        return model

    def dropping(*args, **kwargs):
        with mock.patch.object(tiny_models, "tiny", tiny):
            return reference(*args, **kwargs)

    with mock.patch.object(dense, "reference", dropping):
        yield


def pieces_of(parallel: dict) -> Pieces:
    """The tokens of a micro-batch that each rank with tokens of its own has."""
    whole = torch.arange(MICRO * dense.LENGTH).view(MICRO, dense.LENGTH)
    if "context" in parallel:
        tokens = shard_evenly(dense.LENGTH, ContextAlgorithm(ring=parallel["context"]))
        parts = [whole[:, tokens.index(rank)[0]] for rank in range(parallel["context"])]
    else:
        parts = [whole]
    if parallel.get("sequence_parallel"):
        parts = [each for part in parts for each in part.tensor_split(parallel["tensor"], dim=1)]
    return [part.flatten().tolist() for part in parts]


def hold_to_one_process(family: str, parallel: dict, moe: dict, stages: tuple[int, ...]) -> None:
    """The gradient rule, with tokens dropped on the same pieces."""
    more = {"context_parallel": {"algorithm": "ring"}} if "context" in parallel else {}
    with limited_reference(moe["capacity_factor"], moe.get("capacity_policy", "probs"), pieces_of(parallel)):
        expert_rule.hold_to_one_process(family, parallel, moe, stages, more)
