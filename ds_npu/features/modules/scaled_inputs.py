"""Blocks that pass every token to every expert, times its score for that expert, as Llama-4's do.

Such experts take no choices: a token that did not choose an expert reaches it as zeros, which give zeros. Where ds_npu
computes the experts, the block passes tokens, choices and scores instead, and each token goes only to the experts that
it chose. Runs of copies with small random weights check that both compute the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ds_npu.features.modules.equivalence import (
    computes_the_same,
    forward_of_copy,
    isolated_on_cpu,
    likeness,
    random_input,
)
from ds_npu.models import kinds, names
from ds_npu.models.attributes import attribute
from ds_npu.parallel.expert.dispatch import Piece
from ds_npu.parallel.expert.weights import ExpertWeights, is_experts
from ds_npu.parallel.runtime.forward_wraps import innermost_forward, replace_innermost_forward
from ds_npu.parallel.runtime.marks import Mark

EXPERTS, ROUTER, SHARED, CHOICES, ACTIVATION = "experts", "router", "shared_expert", "top_k", "act_fn"
"""The names in Llama-4's block of its parts, and of the number of experts a token chooses."""
TOKENS, N = 5, 6
"""Tokens, and columns of each expert, in the copies that are compared."""
SCALED: Mark[bool] = Mark("scaled inputs")
"""Marks a module of experts in such a block."""

Run = Callable[[Piece, ExpertWeights], torch.Tensor]
"""The function from tokens, their experts and routing weights to the sums of their experts' outputs."""


def takes_scaled_inputs(model: nn.Module, name: str, known: dict[Hashable, bool]) -> bool:
    """Whether the module ``name`` holds experts that each take every token, times its score.

    ``known``: findings about earlier blocks, by their likeness.
    """
    module = model.get_submodule(name)
    if SCALED.get(module):
        return True
    weights = kinds.own_shapes(module)
    if not name or not is_experts(module) or weights.keys() != {"gate_up_proj", "down_proj"}:
        return False
    block = model.get_submodule(names.owner(name))
    if not _looks_so(block, module):
        return False
    like = likeness(block)
    if like not in known:
        hidden = weights["gate_up_proj"][1]
        with isolated_on_cpu() as generator:
            known[like] = _computes_mlps(module, hidden, generator) and _sums(block, hidden, generator)
    return known[like]


def route_to_chosen(model: nn.Module, name: str) -> None:
    """Make the block around the experts ``name`` pass them tokens [T, H], choices [T, K] and their scores [T, K]."""
    block = model.get_submodule(names.owner(name))
    parts: Any = block

    def forward(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores_TE, logits_TE = parts.router(x_TH)
        # Not topk, which the router has called: a record of the routing holds each choice once.
        ids_TK = scores_TE.argsort(dim=1, descending=True)[:, : parts.top_k]
        routed_TH = parts.experts(x_TH, ids_TK, scores_TE.gather(1, ids_TK))
        # As sequences: with sequence parallelism its linears need to know where these end.
        return parts.shared_expert(hidden_states).flatten(0, -2) + routed_TH, logits_TE

    replace_innermost_forward(block, forward)
    SCALED.set(model.get_submodule(name), True)


def compute_scaled(run: Run, piece: Piece, experts: ExpertWeights) -> torch.Tensor:
    """Call ``run`` with one row for each choice: the token times its score; return each token's sum [T, H]."""
    x_TH, ids_TK, scores_TK = piece
    rows_TKH = (x_TH.unsqueeze(1) * scores_TK.unsqueeze(2)).to(x_TH.dtype)
    # Each row has one choice, with the weight 1.
    ids = ids_TK.reshape(-1, 1)
    out = run((rows_TKH.flatten(0, 1), ids, torch.ones_like(ids, dtype=scores_TK.dtype)), experts)
    return out.view_as(rows_TKH).sum(1)


def _looks_so(block: nn.Module, experts: nn.Module) -> bool:
    """Whether ``block`` has the parts of such a block, and ``experts`` take one argument."""
    has_parts = {EXPERTS, ROUTER, SHARED} <= dict(block.named_children()).keys()
    takes_tokens_only = len(inspect.signature(innermost_forward(experts)).parameters) == 1
    is_whole = dict(experts.named_children()).keys() == {ACTIVATION}
    return has_parts and takes_tokens_only and is_whole and attribute(block, CHOICES, int) is not None


def _computes_mlps(experts: nn.Module, hidden: int, generator: torch.Generator) -> bool:
    """Whether ``experts`` are MLPs of weights [E, H, 2 I], gates first, and [E, I, H], with equal parts of all rows."""
    up = random_input(generator, 2, hidden, 2 * N) / hidden
    down = random_input(generator, 2, N, hidden)
    activation: Any = dict(experts.named_children())[ACTIVATION]

    def ours(x: torch.Tensor) -> torch.Tensor:
        gate, value = (x.view(2, -1, hidden) @ up).chunk(2, dim=-1)
        out: torch.Tensor = (activation(gate) * value) @ down
        return out.view(-1, hidden)

    weights = {"gate_up_proj": nn.Parameter(up.detach()), "down_proj": nn.Parameter(down.detach())}
    return computes_the_same(forward_of_copy(experts, weights, {}), ours, random_input(generator, 2 * TOKENS, hidden))


class _Router(nn.Module):
    """A stand-in for a router: scores of 3 experts, of which a token has chosen 1 or 2."""

    def forward(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_TE = x_TH[:, :3]
        return logits_TE.relu(), logits_TE


class _Experts(nn.Module):
    """A stand-in for experts: zeros give zeros."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        factor = torch.arange(1.0, 4.0, dtype=rows.dtype).view(3, 1, 1)
        return (rows.view(3, -1, rows.shape[-1]) * factor).sin().flatten(0, 1)


def _sums(block: nn.Module, hidden: int, generator: torch.Generator) -> bool:
    """Whether ``block`` adds, to its shared expert's output, the sum of its experts' outputs of tokens times scores."""

    def ours(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_TH = hidden_states.reshape(-1, hidden)
        scores_TE, logits_TE = _Router()(x_TH)
        each = [((expert + 1) * x_TH * scores_TE[:, expert : expert + 1]).sin() for expert in range(3)]
        return functional.logsigmoid(x_TH) + torch.stack(each).sum(0), logits_TE

    theirs = forward_of_copy(block, {}, {EXPERTS: _Experts(), ROUTER: _Router(), SHARED: nn.LogSigmoid()})
    return computes_the_same(theirs, ours, random_input(generator, 2, TOKENS, hidden))
