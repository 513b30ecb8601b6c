"""Linear attention and its convolution over context ranks, in float64 against the recurrence of one process."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from recurrences import convolved, drawn_inputs, recurrent
from wire import Wire

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.ops.linear_attention import Recurrence
from ds_npu.parallel.context.load_balance import Tokens, shard_documents, shard_evenly
from ds_npu.parallel.context.state_scan import convolved_runs, scanned_attention
from ds_npu.parallel.context.token_runs import token_runs
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

pytestmark = pytest.mark.slow

WIDTH, HEADS, KEY, VALUE = 4, 3, 4, 5
CHANNELS = HEADS * (2 * KEY + VALUE)
PACKED = tuple(range(*ends) for ends in [(0, 5), (5, 6), (6, 33), (35, 50), (50, 66)])
"""Of two samples of 33 tokens: a document of one token, padding before and behind."""


@dataclass(frozen=True)
class Case:
    """B samples of S tokens; ``documents`` are of the flattened batch, none where samples are whole."""

    length: int
    batch: int = 1
    documents: tuple[range, ...] = ()

    def tokens(self, algorithm: ContextAlgorithm) -> Tokens:
        if self.documents:
            return shard_documents(self.batch, self.length, self.documents, algorithm)
        return shard_evenly(self.length, algorithm)

    @property
    def segments(self) -> torch.Tensor:
        begins = torch.zeros(self.batch * self.length, dtype=torch.int64)
        for each in self.documents:
            for end in (each.start, each.stop):
                begins[end : end + 1] = 1
        return begins.cumsum(0).view(self.batch, self.length)


CASES = [Case(32, batch=2), Case(37), Case(130), Case(33, batch=2, documents=PACKED), Case(19)]


def algorithms(size: int) -> list[ContextAlgorithm]:
    found = [ContextAlgorithm(size), ContextAlgorithm(1, size)]
    return found + ([ContextAlgorithm(2, size // 2)] if size % 2 == 0 and size > 2 else [])


def leaves_of(case: Case, delta: bool) -> list[torch.Tensor]:
    """x [B, S, C], the decay and beta of its tokens, and the weight and bias of the convolution."""
    *_, decay, beta = drawn_inputs(case.batch, case.length, delta, heads=HEADS)
    generator = torch.Generator().manual_seed(5)
    x, weight, bias, upstream = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in (
            (case.batch, case.length, CHANNELS),
            (CHANNELS, WIDTH),
            (CHANNELS,),
            (case.batch, case.length, HEADS, VALUE),
        )
    )
    return [x, decay, *([beta] if delta else []), weight, bias, upstream]


def recurrence(mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor | None) -> Recurrence:
    q, k, v = (each.unflatten(-1, (HEADS, -1)) for each in mixed.split([HEADS * KEY, HEADS * KEY, HEADS * VALUE], -1))
    return Recurrence(q, torch.nn.functional.normalize(k, dim=-1), v, decay, beta)


@functools.cache
def expected(case: Case, delta: bool) -> list[torch.Tensor]:
    """The output and the gradients of the leaves, in one process."""
    *leaves, upstream = (each.detach() for each in leaves_of(case, delta))
    leaves = [each.requires_grad_() for each in leaves]
    x, decay, *beta, weight, bias = leaves
    mixed = convolved(x, weight, bias, case.segments)
    out, _ = recurrent(recurrence(mixed, decay, *beta or [None]), case.segments)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def on_ranks(case: Case, delta: bool, algorithm: ContextAlgorithm) -> tuple[list[torch.Tensor], Wire]:
    """What this rank computes of its tokens; gradients of weights are summed over the ranks."""
    topology = Topology(Degrees(cp=algorithm.size))
    group, rank = topology.group("cp"), topology.rank("cp")
    tokens = case.tokens(algorithm)
    index = tokens.index(rank).expand(case.batch, -1)
    *leaves, upstream = (each.detach() for each in leaves_of(case, delta))
    *of_tokens, weight, bias = leaves
    mine = [each.take_along_dim(index.view(*index.shape, *[1] * (each.dim() - 2)), 1) for each in of_tokens]
    upstream = upstream.take_along_dim(index[..., None, None], 1)
    leaves = [each.requires_grad_() for each in (*mine, weight, bias)]
    x, decay, *beta, weight, bias = leaves
    runs = token_runs(tokens, algorithm.size, rank, case.batch, WIDTH)
    with Wire() as wire:
        mixed = convolved_runs(runs.arranged(x), weight, bias, runs, group)
        of_runs = [runs.arranged(each) for each in (decay, *beta)]
        out = scanned_attention(recurrence(mixed, *of_runs, *[] if beta else [None]), runs, group)
        out = runs.restored(out, case.batch)
        found = [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
    for each in found[-2:]:
        dist.all_reduce(each)
    return found, wire


def check(size: int) -> None:
    for algorithm, case, delta in itertools.product(algorithms(size), CASES, (True, False)):
        if case.length < algorithm.fewest_tokens:
            continue
        found, _ = on_ranks(case, delta, algorithm)
        index = case.tokens(algorithm).index(dist.get_rank()).expand(case.batch, -1)
        for number, (one, whole) in enumerate(zip(found, expected(case, delta), strict=True)):
            is_weight = number >= len(found) - 2
            true = whole if is_weight else whole.take_along_dim(index.view(*index.shape, *[1] * (whole.dim() - 2)), 1)
            error = (one - true).abs().max() / max(1.0, whole.abs().max())
            assert error < 1e-12, (dist.get_rank(), algorithm, case, delta, number, error)


@pytest.mark.parametrize("size", [2, 8, 3, 4, 5, 6, 7])
@pytest.mark.matrix(corners=2, drawn=1)
def test_states_pass_from_rank_to_rank(size):
    run_on_ranks(size, check, size)


def sent(case: Case, delta: bool, algorithm: ContextAlgorithm) -> list[tuple[str, int]]:
    return on_ranks(case, delta, algorithm)[1].sent


def count(size: int) -> None:
    for algorithm, runs in ((ContextAlgorithm(size), 1), (ContextAlgorithm(1, size), 2)):
        for delta in (True, False):
            messages = sent(Case(64), delta, algorithm)
            # All-gathered: the halo, the maps and the gradients of states; scattered: those of the halo.
            number, halo = runs * size * 8, (WIDTH - 1) * CHANNELS
            transition = KEY * KEY if delta else 1
            gathered = [number * each for each in (halo, HEADS * (transition + KEY * VALUE), HEADS * KEY * VALUE)]
            assert [bytes_of for name, bytes_of in messages if "gather" in name] == gathered, messages
            assert [bytes_of for name, bytes_of in messages if "scatter" in name] == [runs * 8 * halo], messages
            assert len(messages) == 4
            assert messages == sent(Case(192), delta, algorithm)


def test_what_is_sent_does_not_depend_on_the_length():
    run_on_ranks(4, count, 4)
