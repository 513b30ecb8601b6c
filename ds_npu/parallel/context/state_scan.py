"""Linear attention over context ranks: a scan of states over the ranks, and a halo for the convolution before it.

A rank computes the map S -> M S + N of each of its runs, all ranks gather these maps, and each composes them up to its
own runs: the state that they start from. Backward gathers the gradients of these states, and each rank goes through the
maps from the last one to its own. What is sent does not depend on the length of the sequence: for each run and head M
and N, [K, K] (Mamba 2: a number) and [K, V], forward, and a gradient [K, V] backward, in float32 (float64 for float64);
of the convolution the W - 1 last tokens of each run, and their gradients.

All ranks have all maps: with 2 to 8 ranks one all-gather takes less time than as many messages from rank to rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ds_npu.comm.collectives import gather_parts
from ds_npu.comm.crossing import gather
from ds_npu.ops.autograd import Context, applied
from ds_npu.ops.causal_convolution import causal_convolution
from ds_npu.ops.linear_attention import Recurrence, carried, chunks_of
from ds_npu.parallel.context.token_runs import TokenRuns, picked


class _ScanContext(Context):
    runs: TokenRuns
    group: dist.ProcessGroup


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _ScanContext,
        transition: torch.Tensor,
        added: torch.Tensor,
        runs: TokenRuns,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """The state before each of this rank's runs, from the maps of its runs.

        The maps are [P, H, K, K] (or [P, H, 1, 1]) and [P, H, K, V].
        """
        maps = torch.cat([transition.flatten(1), added.flatten(1)], 1)
        numbers = transition[0].numel()
        every, additions = torch.tensor_split(_gathered(maps, runs, group), [numbers], 1)
        every = torch.unflatten(every, 1, transition.shape[1:])
        additions = torch.unflatten(additions, 1, added.shape[1:])
        states = torch.zeros_like(additions)
        for before, after in runs.levels:
            states[after] = carried(every[before], states[before]) + additions[before]
        mine = states[runs.mine]
        ctx.runs, ctx.group = runs, group
        ctx.save_for_backward(every, mine)
        return mine

    @staticmethod
    @once_differentiable
    def backward(ctx: _ScanContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        every, states = ctx.saved_tensors
        runs = ctx.runs
        of_starts = torch.unflatten(_gathered(grads[0].flatten(1), runs, ctx.group), 1, states.shape[1:])
        behind = torch.zeros_like(of_starts)
        for before, after in reversed(runs.levels):
            behind[before] = of_starts[after] + carried(every[after].mT, behind[after])
        mine = behind[runs.mine]
        is_number = every.shape[-1] == 1
        of_transition = (mine * states).sum((-2, -1), keepdim=True) if is_number else mine @ states.mT
        return of_transition, mine, None, None


_scan = applied(_Scan, _Scan.forward)


def _gathered(rows_PX: torch.Tensor, runs: TokenRuns, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather one row for each run of every rank, in the order of the runs' numbers."""
    mine = _padded(rows_PX, runs).contiguous()
    return gather_parts(mine.new_empty(runs.ranks, *mine.shape), mine, group).wait().flatten(0, 1)


def _padded(rows: torch.Tensor, runs: TokenRuns) -> torch.Tensor:
    """Pad ``rows`` with zeros to as many rows as the rank with most runs has."""
    missing = runs.most - len(rows)
    return functional.pad(rows, (*(0, 0) * (rows.dim() - 1), 0, missing)) if missing else rows


def scanned_attention(tokens: Recurrence, runs: TokenRuns, group: dist.ProcessGroup) -> torch.Tensor:
    """``linear_attention`` of this rank's runs [P, L, H, ...] in the sequences of all ranks; every rank calls it.

    Returns [P, L, H, V], of v's dtype.
    """
    if runs.holds is not None:
        # Tokens behind the end of a run change no state.
        held = runs.holds[..., None]
        tokens = tokens._replace(
            k=tokens.k * held[..., None],
            decay=tokens.decay * held,
            beta=None if tokens.beta is None else tokens.beta * held,
        )
    chunks = chunks_of(tokens, runs.segments)
    summary = chunks.summary()
    out, _ = chunks.outputs(_scan(summary.transition, summary.added, runs, group))
    return out.to(tokens.v.dtype)


def convolved_runs(
    x_PLC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    runs: TokenRuns,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """``causal_convolution`` of this rank's runs in the sequences of all ranks, each with the tokens before it."""
    tails = picked(x_PLC.flatten(0, 1), runs.tails)
    every = gather(_padded(tails, runs), 0, group)
    return causal_convolution(x_PLC, weight_CW, bias_C, runs.segments, picked(every.flatten(0, 1), runs.halo))
