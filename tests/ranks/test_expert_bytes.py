"""What a layer of experts sends, and what it keeps for backward: counted, against what its design says."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from wire import Memory, Messages, Wire

from ds_npu.comm.host_copy import HostCopy
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.experts import ExpertOptions, compute_experts
from ds_npu.parallel.expert.overlap import compute_experts_in_halves
from ds_npu.parallel.expert.sharing import Replicas, SharedRows, gathered_gradients
from ds_npu.parallel.expert.weights import ExpertWeights
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

T, K, EXPERTS, H, COLUMNS = 256, 8, 32, 64, 48
FLOAT, NUMBERS = 4, 2
"""Bytes of a number in float32; numbers that are sent for each expert of a token, beside its hidden state."""


def swiglu(first: torch.Tensor) -> torch.Tensor:
    gate, up = first.chunk(2, -1)
    return functional.silu(gate) * up


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rank)
    x, weights = torch.randn(T, H, requires_grad=True), torch.rand(T, K, requires_grad=True)
    return x, torch.rand(T, EXPERTS).argsort(1)[:, :K], weights


def weights_of(count: int) -> ExpertWeights:
    torch.manual_seed(9)
    up, down = nn.Parameter(torch.randn(count, 2 * COLUMNS, H) / 8), nn.Parameter(torch.randn(count, H, COLUMNS) / 8)
    return ExpertWeights(up, down, swiglu)


def rows_to(ids: torch.Tensor, ranks: int) -> list[int]:
    """How many tokens have an expert on each rank, counted one by one."""
    local = EXPERTS // ranks
    return [sum(any(int(each) // local == rank for each in token) for token in ids) for rank in range(ranks)]


def count_messages(level: str) -> None:
    topology = Topology(Degrees(dp=dist.get_world_size(), ep=dist.get_world_size()))
    axis, ranks, me = ExpertAxis.of(topology, tokens_are_sharded=False), dist.get_world_size(), dist.get_rank()
    x, ids, weights = inputs(me)
    sent = rows_to(ids, ranks)
    received = [rows_to(inputs(rank)[1], ranks)[me] for rank in range(ranks)]
    options = ExpertOptions(zero_memory=level)  # type: ignore[arg-type]
    with Wire() as forward:
        out = compute_experts(x, ids, weights, weights_of(EXPERTS // ranks), axis, options)
    with Wire() as backward:
        out.sum().backward()
    away = sum(sent) - sent[me]
    returned = sum(received) - received[me]
    # Each token once to each other rank with an expert of its; without that, once for each of its experts there.
    assert away < T * K * (ranks - 1) / ranks
    routing = away * NUMBERS * K * FLOAT
    exchanged = {"forward": (away + returned) * H * FLOAT + routing}
    again = 0 if level == "none" else away * H * FLOAT
    exchanged["backward"] = (away + returned) * H * FLOAT + again + returned * K * FLOAT
    for name, wire in (("forward", forward), ("backward", backward)):
        found = sum(size for (kind, _), size in wire.leaving.items() if kind == "exchange")
        assert found == exchanged[name], (name, level, found, exchanged[name])
    # The counts, once, and nothing else: in backward they are known.
    counts = (ranks + EXPERTS) * 8
    assert sum(size for (kind, _), size in forward.leaving.items() if kind == "gather") == counts * (ranks - 1)
    assert {kind for kind, _ in backward.leaving} == {"exchange"}


def count_every_level() -> None:
    for level in ("none", "level0", "level1"):
        count_messages(level)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_token_is_sent_once_to_a_rank(ranks):
    run_on_ranks(ranks, count_every_level)


def count_recomputed() -> None:
    """A recomputation that needs no sums computes none, and sends none back; no message is left without a wait."""
    topology = Topology(Degrees(dp=2, ep=2))
    axis, experts = ExpertAxis.of(topology, tokens_are_sharded=False), weights_of(EXPERTS // 2)
    for compute, level in itertools.product((compute_experts, in_halves), ("none", "level0", "level1")):
        options, products, found = ExpertOptions(zero_memory=level), [], []
        for way in (lambda function, *args: function(*args), partial(checkpoint, use_reentrant=False)):
            with (
                Messages() as messages,
                mock.patch.object(ExpertWeights, "forward", counting(products)),
                Wire() as wire,
            ):
                x, ids, weights = inputs(dist.get_rank())
                way(partial(compute, experts=experts, axis=axis, options=options), x, ids, weights).sum().backward()
            assert messages.begun and not messages.unwaited, (compute, level, way)
            found.append((Counter(name for name, _ in wire.sent), len(products), x.grad, weights.grad))
            products.clear()
        (plain, products_of_plain, *gradients), (again, products_of_again, *others) = found
        pieces = 1 if compute is compute_experts else 2
        # Level 1 and level 0 save the layer's input last, behind the sums.
        sums, second = (0, 0) if level == "none" else (pieces, pieces)
        assert again["alltoall_base_"] - plain["alltoall_base_"] == 2 * pieces + sums, (compute, level)
        assert products_of_again - products_of_plain == pieces + second, (compute, level)
        assert all(map(torch.equal, gradients, others)), (compute, level)


def in_halves(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **of: Any) -> torch.Tensor:
    return compute_experts_in_halves((x, ids, weights), **of)


def counting(calls: list[object]) -> Callable[..., torch.Tensor]:
    forward = ExpertWeights.forward
    return lambda *args: calls.append(args) or forward(*args)


def test_a_recomputation_sends_no_sums_back():
    run_on_ranks(2, count_recomputed)


def count_host_waits() -> None:
    axis, waits, read = ExpertAxis.of(Topology(Degrees(dp=2, ep=2)), tokens_are_sharded=False), [], HostCopy.read
    with mock.patch.object(HostCopy, "read", lambda copy: waits.append(copy) or read(copy)):
        for dispatcher, level in itertools.product(("alltoall", "allgather"), ("none", "level0", "level1")):
            options = ExpertOptions(dispatcher, level)
            out = compute_experts(*inputs(dist.get_rank()), weights_of(EXPERTS // 2), axis, options)
            assert len(waits) == 1, (options, len(waits))
            out.sum().backward()
            assert len(waits) == 1, (options, len(waits))
            waits.clear()


def test_the_host_waits_once_for_a_layer_and_never_in_backward():
    """That nothing else waits is counted on NPUs (tests/npu/test_experts_npu.py)."""
    run_on_ranks(2, count_host_waits)


def count_replicas() -> None:
    """The first expert of rank 0 is computed on rank 1, too: its weights go there, and their gradient back."""
    topology, me = Topology(Degrees(dp=2, ep=2)), dist.get_rank()
    plan = SharedRows(2, (((0, 5), (1, 5)), ((0, 3),), ((1, 2),), ((1, 2),)), spare=1)
    replicas = Replicas(plan, ExpertAxis.of(topology, tokens_are_sharded=False))
    weights = [torch.full((2, *shape), 1.0 + me) for shape in ((2 * COLUMNS, H), (H, COLUMNS))]
    one = sum(each[0].nbytes for each in weights)
    with Wire() as there:
        fetched = replicas.fetch(weights).wait()
    assert sum(there.leaving.values()) == (one if me == 0 else 0)
    assert [[float(row.mean()) for row in each] for each in fetched] == [[1.0, 1.0, 0.0] if me == 0 else [2, 2, 1]] * 2
    with Wire() as back:
        gradients = gathered_gradients(replicas, [torch.full_like(each, 10.0 + me) for each in fetched])
    assert sum(back.leaving.values()) == (one if me == 1 else 0)
    assert [[float(row.mean()) for row in each] for each in gradients] == [[21, 10] if me == 0 else [11, 11]] * 2


def test_replicas_send_an_experts_weights_and_gradient_once():
    run_on_ranks(2, count_replicas)


def kept_bytes(layer) -> int:
    """Bytes that ``layer`` (x, ids, weights) keeps for backward, beside its inputs, output and parameters."""
    x, ids, weights = inputs(0)
    with Memory() as memory:
        out = layer(x, ids, weights)
        alive = memory.alive
    return alive - out.nbytes


def compare_levels() -> None:
    axis = ExpertAxis.of(Topology(Degrees()), tokens_are_sharded=False)
    config = Qwen3MoeConfig(
        num_experts=EXPERTS, hidden_size=H, moe_intermediate_size=COLUMNS, num_experts_per_tok=K, hidden_act="silu"
    )
    config._experts_implementation = "grouped_mm"
    plain, experts = Qwen3MoeExperts(config), weights_of(EXPERTS)
    with torch.no_grad():
        plain.gate_up_proj.copy_(experts.up), plain.down_proj.copy_(experts.down)
    before = kept_bytes(plain)
    kept = {
        level: kept_bytes(lambda *a, level=level: compute_experts(*a, experts, axis, ExpertOptions(zero_memory=level)))
        for level in ("none", "level0", "level1")
    }
    share = {level: each / before for level, each in kept.items()}
    row = H + 4 * COLUMNS
    # The measure of the issue: what a layer keeps that multiplies routing weights into the activation.
    assert before >= T * K * row * FLOAT
    assert share["level0"] <= 2 * COLUMNS / row + 0.02, share
    assert share["level1"] <= 0.1, share
    # One rank has all experts: it keeps each token once.
    rows = T * H * FLOAT
    assert kept["none"] - kept["level0"] == rows, (kept, rows)
    assert kept["level0"] - kept["level1"] == T * K * 2 * COLUMNS * FLOAT
    out, right = compute_experts(*inputs(0), experts, axis, ExpertOptions()), plain(*inputs(0))
    assert torch.allclose(out, right, atol=1e-4)


def test_levels_keep_what_they_say():
    run_on_ranks(1, compare_levels)
