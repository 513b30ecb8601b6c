"""Context-parallel attention on NPUs: what is computed, how far rounding may move it, and that kernels compute it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
import torch_npu
from agreement import agree, rounded
from attention_reference import attention
from context_rule import HEADS, Case, own

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.ops.attention import CAUSAL, FULL, Options, reference, sliding
from ds_npu.parallel.context.attention import context_attention
from ds_npu.parallel.context.axis import ContextAxis, context_axis
from ds_npu.parallel.context.kernel_calls import block_calls
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

DTYPES = (torch.float32, torch.bfloat16)
NAMES = ("out", "query", "key", "value")
DOCUMENTS = (range(0, 5), range(5, 6), range(6, 32), range(34, 50), range(50, 64))
"""Of two samples of 32 tokens, of which two are in none."""
MASKS = {
    "causal": {"mask": CAUSAL},
    "full": {"mask": FULL},
    "window": {"mask": sliding(5)},
    "packed": {"mask": CAUSAL, "documents": DOCUMENTS},
}
CASES = [Case(heads, **mask) for heads in HEADS for mask in MASKS.values()]
CALLS = ("npu_fusion_attention", "npu_fusion_attention_grad")


FEW_CASES = [Case("gqa", **MASKS["causal"]), Case("mla", **MASKS["packed"])]


def algorithms(world: int) -> dict[str, ContextAlgorithm]:
    """What ``world`` context ranks can do."""
    found = {
        "ulysses": ContextAlgorithm(ulysses=world, kv_cache="full"),
        "ring": ContextAlgorithm(ring=world),
        "all-gather": ContextAlgorithm(ring=world, gather=True),
    }
    if world == 4:
        found |= {"double ring": ContextAlgorithm(ring=4, window=2), "hybrid": ContextAlgorithm(2, 2)}
    return found


def axes(*found: ContextAlgorithm) -> list[ContextAxis]:
    """Those of the world's ranks, which all call it."""
    topology = Topology(Degrees(cp=dist.get_world_size()))
    return [context_axis(topology, algorithm) for algorithm in found]


def whole(case: Case, dtype: torch.dtype, kept: torch.Tensor | None, keep_prob: float) -> dict[str, tuple]:
    """By name each result [B, S, N, D] of one process in float64, from numbers that ``dtype`` holds, with what its
    rounding is a part of.

    That is for one call of the kernel what ``attention_reference`` says. Here is rounded more often: each block's out
    (which merged is at most weights times |v|) before it is merged, and so what backward begins with; each block's dq,
    dk and dv (together at most the sum of their terms' absolute values) before they are added up in float32; and dk and
    dv of the heads that several Ulysses ranks have, before these are.
    """
    q, k, v, dout = (rounded(x, dtype).transpose(1, 2) for x in case.inputs(torch.float64))
    hidden, scale = ~case.seen(), q.shape[3] ** -0.5
    found = attention(q, k, v, dout, hidden, scale=scale, dtype=dtype, kept=kept, keep_prob=keep_prob)
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    weights = (q @ keys.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(nan=0.0)
    factor = torch.ones_like(weights) if kept is None else kept / keep_prob
    slopes = (weights * (factor * (dout @ values.mT) - (found.out * dout).sum(-1, keepdim=True))).abs()
    out = (weights * factor) @ values.abs()
    slopes = scale * (slopes + weights * (out * dout.abs()).sum(-1, keepdim=True))
    more = {
        "out": out,
        "query": slopes @ keys.abs(),
        "key": 2 * (slopes.mT @ q.abs()).unflatten(1, (-1, group)).sum(2),
        "value": 2 * ((weights * factor).mT @ dout.abs()).unflatten(1, (-1, group)).sum(2),
    }
    exact = {"out": found.out, **found.gradients}
    return {
        name: tuple(x.transpose(1, 2) for x in (exact[name], found.magnitudes[name] + more[name])) for name in NAMES
    }


def computed(
    axis: ContextAxis, case: Case, inputs: list[torch.Tensor], dropout_p: float = 0.0
) -> Iterator[torch.Tensor]:
    """Out of this rank's rows, then (asked for it) the gradients of query, key and value for its gradient of out.

    ``inputs`` are the whole ones, on the CPU.
    """
    tokens = case.tokens(axis.algorithm)
    *leaves, dout = (own(x, tokens, axis.rank).npu() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    out = context_attention(*leaves, axis, Options(mask=case.mask, dropout_p=dropout_p), tokens)
    yield out.detach()
    yield from torch.autograd.grad(out, leaves, dout)


def calls_of(axis: ContextAxis, case: Case) -> int:
    """How often the kernel is called in each pass."""
    algorithm, tokens = axis.algorithm, case.tokens(axis.algorithm)
    sources = [None] if algorithm.gather else range(algorithm.ring)
    packs = case.batch == 1 or tokens.samples > 1
    bounds = case.mask.before, case.mask.after
    return sum(len(block_calls(tokens, axis.ring_rank, source, bounds, packs)) for source in sources)


@contextmanager
def kernels_only() -> Iterator[Counter[str]]:
    """Counts calls of torch_npu's attention by name; the reference in plain PyTorch may not be called."""
    counted: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., object]:
        kernel = vars(torch_npu)[name]

        def call(*args: object, **kwargs: object) -> object:
            counted[name] += 1
            return kernel(*args, **kwargs)

        return call

    def refused(*args: object) -> None:
        raise AssertionError("attention ran without its kernel")

    kernels = {name: counting(name) for name in CALLS}
    with (
        mock.patch.multiple(torch_npu, **kernels),
        mock.patch.multiple(reference, forward=refused, backward=refused),
    ):
        yield counted


def check(
    axis: ContextAxis, case: Case, dtype: torch.dtype, kept: torch.Tensor | None = None, dropout_p: float = 0.0
) -> None:
    """Assert that this rank's out and gradients are those of one process in float64."""
    with kernels_only() as counted:
        found = list(computed(axis, case, case.inputs(dtype), dropout_p))
    told = f"{axis.algorithm} rank {axis.rank}, {case}, {dtype}"
    assert [counted[name] for name in CALLS] == [calls_of(axis, case)] * 2, told
    tokens = case.tokens(axis.algorithm)
    for name, one, (exact, magnitude) in zip(
        NAMES, found, whole(case, dtype, kept, 1 - dropout_p).values(), strict=True
    ):
        assert one.dtype == dtype
        try:
            agree(one, own(exact, tokens, axis.rank), own(magnitude, tokens, axis.rank), roundings=1)
        except AssertionError as error:
            raise AssertionError(f"{name} of {told}: {error}") from None


def kept_weights(axis: ContextAxis, case: Case, dropout_p: float) -> torch.Tensor:
    """Which weights [B, N, S, S] all ranks keep when the generator is as it is now: float64, 1 where nobody looks.

    With scores that are all the same and a value that names its key, a row of out is the row's dropped weights.
    """
    q, k, *_ = case.inputs(torch.float32)
    shape = (case.batch, case.length)
    named = torch.eye(case.length)[:, None].expand(*shape, k.shape[2], case.length)
    zeros = [torch.zeros(*shape, x.shape[2], case.length) for x in (q, k)]
    out = next(computed(axis, case, [*zeros, named, torch.zeros(*shape, q.shape[2], case.length)], dropout_p))
    tokens = case.tokens(axis.algorithm)
    counts = [tokens.count(rank) for rank in range(axis.size)]
    assert min(counts) == max(counts)
    parts = [torch.empty_like(out) for _ in counts]
    dist.all_gather(parts, out)
    weights = torch.empty(*shape, q.shape[2], case.length)
    for rank, part in enumerate(parts):
        for sample in range(case.batch):
            weights[sample, tokens.index(rank).expand(case.batch, -1)[sample]] = part[sample].cpu()
    seen = case.seen().expand(-1, q.shape[2], -1, -1)
    weights = weights.transpose(1, 2)
    kept = (weights != 0) | ~seen
    share = 1 / seen.sum(-1, keepdim=True).clamp(min=1) / (1 - dropout_p)
    torch.testing.assert_close(weights, torch.where(kept & seen, share, 0.0))
    return kept.double()
