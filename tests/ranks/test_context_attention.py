"""Context-parallel attention in float64 against one process: every algorithm, mask, kind of heads and number of ranks.

``python tests/ranks/test_context_attention.py`` prints what it finds.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from context_rule import HEADS, Case, errors, own, reference
from ranks import run_on_ranks

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.ops.attention import CAUSAL, FULL, Mask, Options, attention, sliding
from ds_npu.parallel.context.attention import context_attention, ulysses_plan
from ds_npu.parallel.context.axis import ContextAxis, context_axis
from ds_npu.parallel.context.load_balance import shard_evenly
from ds_npu.parallel.context.ulysses import post_to_heads
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

pytestmark = pytest.mark.slow

DOCUMENTS = tuple(range(*ends) for ends in [(0, 5), (5, 6), (6, 32), (34, 50), (50, 61)])
"""Of two samples of 32 tokens, with padding before and behind."""
MASKS = {
    "causal": {"mask": CAUSAL},
    "full": {"mask": FULL},
    "window": {"mask": sliding(5)},
    "packed": {"mask": CAUSAL, "documents": DOCUMENTS},
}
CASES = [Case(heads=heads, **mask) for heads in HEADS for mask in MASKS.values()]
UNEVEN = [
    Case("gqa", CAUSAL, length=33),
    Case("gqa", sliding(20), batch=1, length=37),
    Case("mla", FULL, batch=1, length=37),
    Case("gqa", sliding(5), zigzag=False),
    Case("mqa", sliding(4), documents=DOCUMENTS),
    Case("gqa", FULL, documents=DOCUMENTS),
    Case("gqa", Mask(before=3, after=2)),
]
DENSE = [
    Case("mha", Mask(dense=torch.rand(*shape, generator=torch.Generator().manual_seed(4)) < 0.6))
    for shape in ((32, 32), (2, 1, 32, 32), (2, 8, 32, 32))
]


CHANGED = [
    Case("gqa", CAUSAL, has_sinks=True),
    Case("mqa", sliding(5), has_sinks=True, softcap=0.5),
    Case("mha", CAUSAL, documents=DOCUMENTS, has_sinks=True),
    Case("gqa", CAUSAL, softcap=0.5),
    Case("mha", DENSE[2].mask, softcap=0.5, has_sinks=True),
]
"""Soft caps, and attention sinks."""


def algorithms(size: int) -> list[ContextAlgorithm]:
    """All for ``size`` context ranks, and what they may keep for backward."""
    found = [ContextAlgorithm(size), ContextAlgorithm(1, size), ContextAlgorithm(1, size, gather=True)]
    for kept in ("half", "full"):
        found += [ContextAlgorithm(a.ulysses, a.ring, gather=a.gather, kv_cache=kept) for a in found[:3]]
    for inner in range(2, size):
        if size % inner == 0:
            found += [
                ContextAlgorithm(inner, size // inner),
                ContextAlgorithm(1, size, inner),
                ContextAlgorithm(1, size, inner, kv_cache="half"),
            ]
    if size == 8:
        found += [ContextAlgorithm(2, 4, 2), ContextAlgorithm(4, 2, gather=True)]
    return found


def axes(size: int) -> Iterator[ContextAxis]:
    topology = Topology(Degrees(cp=size))
    return (context_axis(topology, algorithm) for algorithm in algorithms(size))


def wrong(axis: ContextAxis, case: Case) -> float:
    found = max(errors(axis, case))
    assert found < 1e-12, f"rank {axis.rank}, {axis.algorithm}, {case}: {found}"
    return found


def equals_one_process(size: int) -> None:
    for axis in axes(size):
        worst = max(wrong(axis, case) for case in (*CASES, *UNEVEN, *DENSE, *CHANGED))
        if axis.rank == 0:
            print(f"cp {size}  {axis.algorithm}: {len(CASES + UNEVEN + DENSE + CHANGED)} cases, worst {worst:.1e}")


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_attention_equals_one_process(size):
    run_on_ranks(size, equals_one_process, size)


def with_layouts() -> None:
    case = Case("gqa", CAUSAL, batch=1)
    q, k, v, dout = case.inputs(torch.float64)
    expected = reference(case)
    for axis in axes(2):
        tokens = case.tokens(axis.algorithm)
        for layout, put, back in [
            ("BNSD", lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2)),
            ("SBH", lambda x: x.transpose(0, 1).flatten(2), lambda x: x.unflatten(-1, (8, -1)).transpose(0, 1)),
            ("TND", lambda x: x[0], lambda x: x[None]),
        ]:
            mask = CAUSAL.packed([case.length]) if layout == "TND" else CAUSAL
            options = Options(layout, mask, heads=8 if layout == "SBH" else 0)
            leaves = [put(own(x, tokens, axis.rank)).requires_grad_() for x in (q, k, v)]
            out = context_attention(*leaves, axis, options)
            gradients = torch.autograd.grad(out, leaves, put(own(dout, tokens, axis.rank)))
            torch.testing.assert_close(back(out), own(expected[0], tokens, axis.rank))
            for found, wanted in zip(gradients, expected[1:], strict=True):
                torch.testing.assert_close(found, put(own(wanted, tokens, axis.rank)), rtol=0, atol=1e-13)


def test_layouts():
    run_on_ranks(2, with_layouts)


def dropped(seed: int, visible: torch.Tensor, axis: ContextAxis, case: Case) -> torch.Tensor:
    """What dropout multiplies this rank's weights by, [B, N, s, S]: seen through weights that are all the same.

    Without scores each weight is 1 / keys, and values of one key each show them one by one.
    """
    tokens = case.tokens(axis.algorithm)
    q, k, *_ = case.inputs(torch.float64)
    heads, length = q.shape[2], case.length
    values = torch.eye(length, dtype=torch.float64)[None, :, None].expand(case.batch, -1, k.shape[2], -1)
    q, k, values = (own(x, tokens, axis.rank) for x in (q * 0, k * 0, values))
    torch.manual_seed(seed + axis.rank)
    shown = context_attention(q, k, values, axis, Options(mask=case.mask, dropout_p=0.3), tokens)
    count = own(visible.sum(-1)[:, 0, :, None, None].expand(-1, -1, heads, 1), tokens, axis.rank)
    return (shown * count).transpose(1, 2)


def replays_dropout(size: int) -> None:
    for axis in axes(size):
        # Mean and spread of the pattern over a rank's rows need some of them.
        case = Case("gqa", CAUSAL, length=64)
        tokens = case.tokens(axis.algorithm)
        visible = case.seen().expand(case.batch, -1, -1, -1)
        kept = dropped(3, visible, axis, case)
        mine = own(visible[:, 0], tokens, axis.rank)[:, None].expand_as(kept)
        assert ((kept[mine] == 0) | ((kept[mine] - 1 / 0.7).abs() < 1e-9)).all()
        assert abs((kept[mine] == 0).double().mean().item() - 0.3) < 0.02
        *inputs, dout = case.inputs(torch.float64)
        torch.manual_seed(3 + axis.rank)
        leaves = [own(x, tokens, axis.rank).requires_grad_() for x in inputs]
        out = context_attention(*leaves, axis, Options(mask=case.mask, dropout_p=0.3), tokens)
        found = torch.autograd.grad(out, leaves, own(dout, tokens, axis.rank))
        # One process: this rank's rows with its pattern; the gradients of keys and values add up over the ranks.
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        rows = own(q, tokens, axis.rank)
        keys, values = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        scores = torch.einsum("bsnd,btnd->bnst", rows, keys) * q.shape[3] ** -0.5
        weights = scores.masked_fill(~mine, -torch.inf).softmax(-1) * kept
        expected = torch.einsum("bnst,btnd->bsnd", weights, values)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        wanted = torch.autograd.grad(expected, (q, k, v), own(dout, tokens, axis.rank))
        for one in wanted:
            dist.all_reduce(one)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, own(other, tokens, axis.rank), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_the_pattern_of_dropout_survives_into_backward(size):
    run_on_ranks(size, replays_dropout, size)


def as_one_process_in(dtype: torch.dtype) -> None:
    for axis in axes(4):
        for case in (Case("mha", CAUSAL, length=128), Case("gqa", FULL, length=128)):
            q, k, v, dout = case.inputs(dtype)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out, _ = attention(*leaves, Options(mask=case.mask))
            alone = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
            # Of the tokens that this rank has: relative to their own largest value, as ``errors`` are.
            tokens = case.tokens(axis.algorithm)
            mine = [[own(x, tokens, axis.rank) for x in each] for each in zip(alone, reference(case), strict=True)]
            limits = [2 * ((a.double() - b).abs().max() / b.abs().max()).item() for a, b in mine]
            found = errors(axis, case, dtype)
            assert all(one <= limit for one, limit in zip(found, limits, strict=True)), (axis.algorithm, found, limits)


def test_bfloat16_is_as_exact_as_one_process():
    run_on_ranks(4, as_one_process_in, torch.bfloat16)


def projection_starts_its_transfer() -> None:
    case = Case("gqa", CAUSAL, length=33)
    q, k, v, dout = case.inputs(torch.float64)
    expected = reference(case)
    axis = context_axis(Topology(Degrees(cp=2)), ContextAlgorithm(2))
    tokens = case.tokens(axis.algorithm)
    plan = ulysses_plan(axis, 8, 2, tokens)
    leaves = [own(x, tokens, axis.rank).requires_grad_() for x in (q, k, v)]
    kinds = (plan.query, plan.key, plan.key)
    gone = [post_to_heads(x, exchange) for x, exchange in zip(leaves, kinds, strict=True)]
    out = context_attention(*gone, axis, Options(mask=CAUSAL), tokens)
    found = [out, *torch.autograd.grad(out, leaves, own(dout, tokens, axis.rank))]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, own(other, tokens, axis.rank), rtol=0, atol=1e-13)


def test_what_departed_behind_its_projection_is_taken():
    run_on_ranks(2, projection_starts_its_transfer)


def refuses() -> None:
    topology = Topology(Degrees(cp=2))
    ring, heads = (context_axis(topology, each) for each in (ContextAlgorithm(1, 2), ContextAlgorithm(2)))
    x = torch.zeros(1, 8, 1, 4)
    whole = torch.zeros(16, 16, dtype=torch.bool)
    packed = CAUSAL.packed([12])
    dense_in_part = Options(mask=Mask(dense=whole[:8]))
    for call, message in [
        (lambda: context_attention(x, x, x, heads), "1 query heads .* ds_npu.context_parallel.ulysses"),
        (lambda: context_attention(x[:, :1], x[:, :1], x[:, :1], ring), "found 2, at least 4 are needed"),
        (lambda: context_attention(x, x, x, ring, dense_in_part), r"the whole \[..., 16, 16\]"),
        (lambda: context_attention(x, x, x, ring, tokens=shard_evenly(18, ring.algorithm)), "has 9 tokens"),
        (lambda: context_attention(x[0], x[0], x[0], ring, Options("TND", packed)), "has 6 tokens"),
        (
            lambda: context_attention(x, x, x, ring, tokens=shard_evenly(16, heads.algorithm)),
            "sharded over 1 x 2",
        ),
        (lambda: context_attention(x, x[:, :4], x[:, :4], ring), "found q .* and k"),
        (lambda: context_axis(topology, ContextAlgorithm(4)), "for 4 context ranks; ds_npu.parallel.context is 2"),
    ]:
        try:
            call()
        except ValueError as error:
            assert re.search(message, str(error)), f"{error} does not match {message}"
        else:
            raise AssertionError(f"no error: {message}")


def test_what_does_not_go_together_is_refused():
    run_on_ranks(2, refuses)


def recomputes() -> None:
    case = Case("gqa", CAUSAL)
    expected = reference(case)
    for axis in axes(2):
        tokens = case.tokens(axis.algorithm)
        *inputs, dout = (own(x, tokens, axis.rank) for x in case.inputs(torch.float64))
        for reentrant in (True, False):
            leaves = [x.clone().requires_grad_() for x in inputs]
            attend = functools.partial(context_attention, axis=axis, options=Options(mask=CAUSAL), tokens=tokens)
            out = torch.utils.checkpoint.checkpoint(attend, *leaves, use_reentrant=reentrant)
            out.backward(dout)
            for one, other in zip(leaves, expected[1:], strict=True):
                torch.testing.assert_close(one.grad, own(other, tokens, axis.rank), rtol=0, atol=1e-13)
        with torch.no_grad():
            out = context_attention(*inputs, axis, Options(mask=CAUSAL), tokens)
        torch.testing.assert_close(out, own(expected[0], tokens, axis.rank), rtol=0, atol=1e-13)


def test_recomputation_and_inference():
    run_on_ranks(2, recomputes)
