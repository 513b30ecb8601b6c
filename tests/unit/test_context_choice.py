"""What algorithms of context parallelism are estimated to cost, against counting by hand, and which one is chosen."""

from __future__ import annotations

import dataclasses
import itertools
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_npu.config.context_algorithm import ContextAlgorithm, algorithm_of
from ds_npu.config.context_parallel import ContextParallelSection, algorithms, wrong_factors
from ds_npu.config.problems import ConfigError
from ds_npu.features.build import Build
from ds_npu.models.plan import AttentionShape
from ds_npu.parallel.context.ring_schedule import ring_steps
from ds_npu.parallel.tensor.sharding import near_even
from ds_npu.planner import context_cost
from ds_npu.planner.context_choice import algorithm_text, choose, choose_for, communicators, estimated, refusals
from ds_npu.planner.context_cost import Layer, impossible, layer_cost
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.machine import A2, A3, machine_of

LLAMA = AttentionShape(32, 8, 128, 128)
MLA = AttentionShape(16, 16, 192, 128)
OPEN = ContextParallelSection()
KV_CACHES = ("none", "half", "full")
FAST = dataclasses.replace(A2, node=1 << 20)
"""All ranks in one node."""


def costs(shape, length, degrees, algorithm, machine=FAST, **layer):
    return layer_cost(Layer(shape, length, **layer), algorithm, degrees, machine)


def total(one_pass):
    return one_pass.near_bytes + one_pass.far_bytes


# ---- bytes, against a walk over every number of a small attention ----


def exchanged(shape, length, samples, ranks, e=2):
    """Bytes of forward's and backward's all-to-alls: of each one, what the rank that sends most sends."""
    heads = [range(*part) for part in near_even(shape.heads, ranks)]
    share = shape.heads // shape.kv_heads
    owner = [rank for rank, part in enumerate(near_even(length, ranks)) for _ in range(*part)]
    needed = {
        "q": [set(mine) for mine in heads],
        "k": [{head // share for head in mine} for mine in heads],
    }
    widths = {"q": shape.head_dim, "k": shape.head_dim, "v": shape.value_dim, "out": shape.value_dim}

    def sent(name, to_heads):
        numbers = [0] * ranks
        for token, rank in itertools.product(range(length), range(ranks)):
            if rank != owner[token]:
                sender = owner[token] if to_heads else rank
                numbers[sender] += len(needed["q" if name in ("q", "out") else "k"][rank]) * widths[name]
        return max(numbers) * samples * e

    forward = sum(sent(name, True) for name in "qkv") + sent("out", False)
    backward = sent("out", True) + sum(sent(name, False) for name in "qkv")
    return forward, backward, {name: sent(name, True) for name in "kv"}


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize(
    "shape",
    [AttentionShape(12, 12, 4, 4), AttentionShape(12, 2, 4, 4), AttentionShape(7, 1, 4, 6), AttentionShape(6, 6, 6, 4)],
    ids=["MHA", "GQA", "MQA", "MLA"],
)
def test_ulysses_sends_what_a_walk_over_tokens_and_heads_counts(shape, ranks):
    forward, backward, again = exchanged(shape, 24, 2, ranks)
    for kv_cache, more in (("full", 0), ("half", again["v"]), ("none", again["k"] + again["v"])):
        algorithm = algorithm_of("ulysses", ranks, kv_cache=kv_cache)
        found = costs(shape, 24, Degrees(cp=ranks), algorithm, samples=2)
        assert (total(found.forward), total(found.backward)) == pytest.approx((forward, backward + more), rel=1e-12)


@pytest.mark.parametrize(("ranks", "near"), [(8, 8), (8, 4), (8, 2), (8, 1)])
def test_ulysses_far_bytes_go_to_ranks_of_other_nodes(ranks, near):
    found = costs(
        LLAMA, 64, Degrees(cp=ranks, dp=2), algorithm_of("ulysses", ranks), dataclasses.replace(A2, node=near)
    )
    peers = [rank // near for rank in range(1, ranks)]
    assert found.both.near_bytes / total(found.both) == pytest.approx(peers.count(0) / len(peers))


@pytest.mark.parametrize("name", ["ring", "allgather"])
@pytest.mark.parametrize(("kv_cache", "again"), [("none", "kv"), ("half", "v"), ("full", "")])
@pytest.mark.parametrize("shape", [LLAMA, MLA], ids=["GQA", "MLA"])
def test_a_rank_gets_the_keys_and_values_of_every_other_and_sums_of_their_gradients_go_back(
    shape, kv_cache, again, name
):
    ranks, length, e = 4, 64, 2
    found = costs(shape, length, Degrees(cp=ranks), algorithm_of(name, ranks, kv_cache=kv_cache))
    widths = {"k": shape.head_dim, "v": shape.value_dim}
    of_others = (length - length // ranks) * shape.kv_heads
    fetched, summed = e * sum(widths[each] for each in again), 4 * sum(widths.values())
    assert total(found.forward) == of_others * e * sum(widths.values())
    assert total(found.backward) == of_others * (fetched + summed)


def test_a_double_ring_sends_as_much_as_a_ring_and_less_of_it_to_other_nodes():
    machine, degrees = dataclasses.replace(A2, node=4), Degrees(cp=8, dp=2)
    ring, double = (costs(LLAMA, 64, degrees, ContextAlgorithm(1, 8, window), machine).forward for window in (1, 4))
    block = 8 * 8 * 256 * 2
    assert (ring.near_bytes, ring.far_bytes) == (0, 7 * block)
    assert (double.near_bytes, double.far_bytes) == (6 * block, 1 * block)


def test_what_is_gathered_enters_a_node_once():
    found = costs(LLAMA, 64, Degrees(cp=8, dp=2), algorithm_of("allgather", 8), dataclasses.replace(A2, node=4))
    block = 8 * 8 * 256 * 2
    # Four ranks of a node bring in the four blocks of the other node, one each, and give each other all they have.
    assert (found.forward.far_bytes, found.forward.near_bytes) == (block, 3 * 2 * block)


def test_a_hybrid_has_the_exchange_of_its_groups_and_the_ring_of_what_they_hold():
    hybrid = costs(LLAMA, 64, Degrees(cp=8), ContextAlgorithm(4, 2))
    exchange = costs(LLAMA, 32, Degrees(cp=4), algorithm_of("ulysses", 4))
    ring = costs(AttentionShape(8, 2, 128, 128), 64, Degrees(cp=2), algorithm_of("ring", 2))
    for name in ("forward", "backward"):
        parts = [getattr(each, name) for each in (exchange, ring)]
        assert total(getattr(hybrid, name)) == sum(map(total, parts))
        assert getattr(hybrid, name).messages == sum(part.messages for part in parts)


def test_tensor_ranks_share_heads():
    assert costs(LLAMA, 64, Degrees(cp=4, tp=4), algorithm_of("ulysses", 4)) == costs(
        AttentionShape(8, 2, 128, 128), 64, Degrees(cp=4), algorithm_of("ulysses", 4)
    )


def test_memory():
    block, e, degrees = 16 * 8 * 256, 2, Degrees(cp=4)
    kept = {name: costs(LLAMA, 64, degrees, algorithm_of("ring", 4, kv_cache=name)).kept_bytes for name in KV_CACHES}
    assert kept == {"none": 0, "half": 3 * block * e / 2, "full": 3 * block * e}
    # Two key heads for four ranks: each keeps one of the four quarters of the sequence, 4 * 1 in place of 1 * 2.
    repeated = costs(AttentionShape(8, 2, 128, 128), 64, degrees, algorithm_of("ulysses", 4))
    assert repeated.kept_bytes == (64 * 1 - 16 * 2) * 256 * e
    gathered = costs(LLAMA, 64, degrees, algorithm_of("allgather", 4))
    assert gathered.working_bytes >= 4 * block * e


# ---- time ----


def test_attention_counts_the_operations_of_its_products():
    machine = dataclasses.replace(A2, kernel=0.0, attention=((1, 1.0),))
    found = costs(MLA, 64, Degrees(cp=4), algorithm_of("ring", 4), machine, samples=3)
    scores = 3 * 16 * 64 * 64 / 4 / 2
    assert found.forward.attention_s == 2 * scores * (192 + 128)
    # Scores and their gradient again, then the gradients of values, queries and keys.
    assert found.backward.attention_s == 2 * scores * (192 + 128 + 128 + 192 + 192)
    full = costs(MLA, 64, Degrees(cp=4), algorithm_of("ring", 4), machine, samples=3, causal=False)
    assert full.both.attention_s == 2 * found.both.attention_s


def test_attention_runs_at_the_rate_of_the_keys_of_one_call():
    machine = dataclasses.replace(A2, kernel=1e-3, attention=((64, 1.0), (256, 4.0)))
    for algorithm, keys_rate, calls in (("ulysses", 4.0, 1), ("allgather", 4.0, 2), ("ring", 1.0, 4)):
        found = costs(LLAMA, 256, Degrees(cp=4), algorithm_of(algorithm, 4), machine).forward
        flop = 2 * (32 * 256 * 256 / 4 / 2) * (128 + 128)
        assert found.attention_s == pytest.approx(flop / keys_rate + calls * 1e-3, rel=1e-12)


def test_ranks_wait_for_the_one_with_most_heads():
    even, uneven = (
        costs(AttentionShape(n, n, 64, 64), 4096, Degrees(cp=4), algorithm_of("ulysses", 4)) for n in (8, 6)
    )
    assert even.both.attention_s == uneven.both.attention_s


SECONDS = st.integers(0, 9).map(float)


@given(st.integers(2, 8), SECONDS, SECONDS)
def test_a_ring_waits_for_what_a_step_does_not_hide(size, step_s, message_s):
    waited = context_cost._waited(ring_steps(0, size, size), step_s, 1.0, 0.0, lambda link, size: message_s)
    assert waited == (size - 1) * max(0.0, message_s - step_s)


@given(st.integers(2, 4), st.integers(2, 4), SECONDS, SECONDS)
def test_the_outer_hop_of_a_double_ring_hides_behind_an_inner_ring(rings, window, step_s, outer_s):
    steps = ring_steps(0, rings * window, window)
    waited = context_cost._waited(steps, step_s, 1.0, 0.0, lambda link, size: outer_s * (link == "outer"))
    assert waited == (rings - 1) * max(0.0, outer_s - window * step_s)


@given(st.integers(2, 8), SECONDS)
def test_the_last_sum_of_gradients_is_never_hidden(size, message_s):
    waited = context_cost._waited(ring_steps(0, size, size), 100.0, 0.0, 1.0, lambda link, size: message_s)
    assert waited == message_s


@pytest.mark.parametrize("window", [1, 2, 4])
def test_nothing_is_waited_for_where_nothing_takes_time(window):
    steps = ring_steps(0, 8, 8 if window == 1 else window)
    assert context_cost._waited(steps, 1.0, 1.0, 1.0, lambda link, size: 0.0) == 0


SIZES = st.sampled_from([2, 3, 4, 6, 8, 12, 16])
SPEEDS = ("port", "link", "network", "attention", "memory")


def twice_as_fast(machine, speed):
    found = getattr(machine, speed)
    twice = tuple((keys, 2 * rate) for keys, rate in found) if speed == "attention" else 2 * found
    return dataclasses.replace(machine, **{speed: twice})


@given(SIZES, st.sampled_from([1, 2, 8]), st.integers(6, 20), st.sampled_from(SPEEDS), st.sampled_from([A2, A3]))
def test_a_faster_machine_is_no_slower(context, tensor, logarithm, speed, machine):
    layer, degrees = Layer(LLAMA, 2**logarithm), Degrees(cp=context, tp=tensor, dp=8)
    faster = twice_as_fast(machine, speed)
    for slow, fast in zip(
        *(estimated(algorithms(OPEN, context), layer, degrees, m) for m in (machine, faster)), strict=True
    ):
        assert slow.impossible == fast.impossible
        assert slow.impossible or fast.cost.seconds <= slow.cost.seconds * (1 + 1e-12)


# ---- choice ----


def chosen(shape, length, degrees, machine=A2, **keys):
    return algorithm_text(choose_for(ContextParallelSection(**keys), Layer(shape, length), degrees, machine).algorithm)


def test_known_points():
    eight, nodes = Degrees(cp=8, dp=8), Degrees(cp=32, dp=2)
    many, few = AttentionShape(32, 32, 128, 128), AttentionShape(32, 2, 128, 128)
    assert chosen(many, 8192, eight) == chosen(LLAMA, 8192, eight) == chosen(LLAMA, 131072, eight) == "ulysses"
    assert chosen(few, 1 << 20, nodes) == "hybrid (ulysses 8)"
    assert chosen(AttentionShape(8, 8, 128, 128), 131072, Degrees(cp=16, dp=4)) == "hybrid (ulysses 8)"
    # All of a node's ranks are tensor ranks: everything goes to other nodes, and most of it hides in a ring.
    assert chosen(AttentionShape(64, 8, 128, 128), 1 << 18, Degrees(cp=8, tp=8)) == "ring"
    # So it would here, but blocks of 8,192 keys leave the kernel at three quarters of its rate.
    assert chosen(AttentionShape(64, 8, 128, 128), 65536, Degrees(cp=8, tp=8)) == "allgather"
    # One super node: no link is slow.
    assert chosen(LLAMA, 131072, Degrees(cp=16, dp=4), A3) == "ulysses"


@given(SIZES, st.integers(1, 16), st.integers(5, 20))
def test_no_more_ulysses_ranks_than_heads(context, heads, logarithm):
    shape, degrees = AttentionShape(heads, heads, 64, 64), Degrees(cp=context, dp=2)
    choice = choose_for(OPEN, Layer(shape, 2**logarithm), degrees)
    assert choice.algorithm.ulysses <= heads and choice.algorithm.size == context
    for each in choice.candidates:
        assert bool(each.impossible) == (each.cost is None) == (each.algorithm.ulysses > heads)


KEYS = st.fixed_dictionaries(
    {},
    optional={
        "algorithm": st.sampled_from(["ulysses", "ring", "hybrid", "allgather"]),
        "ulysses": SIZES,
        "window": SIZES,
        "kv_cache": st.sampled_from(KV_CACHES),
    },
)


@given(KEYS, SIZES)
def test_keys_that_are_given_are_kept(keys, context):
    section = ContextParallelSection(**keys)
    found = algorithms(section, context)
    assert len(set(found)) == len(found)
    for algorithm in found:
        assert algorithm.size == context and (algorithm.name == keys.get("algorithm", algorithm.name))
        assert algorithm.ulysses == keys.get("ulysses", algorithm.ulysses)
        assert "window" not in keys or keys["window"] in (algorithm.window, algorithm.ring * (algorithm.window == 1))
        assert algorithm.kv_cache == keys.get("kv_cache", "full" if algorithm.name == "ulysses" else "none")
    if found:
        assert choose_for(section, Layer(AttentionShape(16, 16, 64, 64), 4096), Degrees(cp=context)).algorithm in found


def test_every_algorithm_is_a_candidate():
    found = {(each.name, each.ulysses, each.window) for each in algorithms(OPEN, 8)}
    rings = {("ring", 1, 1), ("ring", 1, 2), ("ring", 1, 4)}
    hybrids = {("hybrid", 2, 1), ("hybrid", 2, 2), ("hybrid", 4, 1)}
    assert found == {("ulysses", 8, 1), ("allgather", 1, 1)} | rings | hybrids


@given(st.permutations(algorithms(OPEN, 16)), st.integers(8, 20))
def test_the_choice_is_the_same_whatever_the_order(order, logarithm):
    layer, degrees = Layer(LLAMA, 2**logarithm), Degrees(cp=16, dp=4)
    assert choose(estimated(order, layer, degrees)) == choose_for(OPEN, layer, degrees)


def test_of_equals_the_simplest_is_taken():
    # A ring all of whose messages hide is as fast with any window; the single ring has fewest communicators.
    layer, degrees = Layer(LLAMA, 1 << 20), Degrees(cp=16)
    choice = choose_for(ContextParallelSection(algorithm="ring"), layer, degrees)
    assert len({round(each.cost.seconds, 9) for each in choice.candidates}) == 1
    assert algorithm_text(choice.algorithm) == "ring" and choice.reason == "the simplest of 4 that are as fast"
    assert [communicators(each) for each in algorithms(OPEN, 4)] == [1, 1, 2, 5, 3]


def test_what_is_impossible_says_why():
    layer = Layer(AttentionShape(8, 8, 128, 128), 20)
    assert "16 Ulysses ranks need a query head each, and a tensor rank has 8" in impossible(
        layer, algorithm_of("ulysses", 16), Degrees(cp=16)
    )
    assert "a tensor rank has 4" in impossible(layer, algorithm_of("ulysses", 8), Degrees(cp=8, tp=2))
    assert impossible(layer, algorithm_of("ring", 16), Degrees(cp=16)) == (
        "a sequence of 20 tokens is too short; at least 32 are needed"
    )
    assert impossible(layer, algorithm_of("ulysses", 8), Degrees(cp=8)) is None
    # One line a reason, whatever the number of algorithms that it rules out.
    assert refusals(estimated(algorithms(OPEN, 16), layer, Degrees(cp=16))) == [
        "ulysses: 16 Ulysses ranks need a query head each, and a tensor rank has 8",
        "allgather, ring, ring (window 2) and 8 more: a sequence of 20 tokens is too short; at least 32 are needed",
    ]


@pytest.mark.parametrize(
    ("keys", "path", "found"),
    [
        ({}, "ds_npu.parallel.context", 16),
        (
            {"algorithm": "ulysses", "kv_cache": "full"},
            "ds_npu.parallel.context, ds_npu.context_parallel.algorithm",
            [16, "ulysses"],
        ),
    ],
)
def test_keys_that_leave_nothing_are_named(keys, path, found):
    with pytest.raises(ConfigError) as caught:
        choose_for(ContextParallelSection(**keys), Layer(AttentionShape(8, 8, 128, 128), 20), Degrees(cp=16))
    (problem,) = caught.value.problems
    assert (problem.path, problem.found) == (path, found)
    assert "16 Ulysses ranks need a query head each, and a tensor rank has 8" in problem.accepted


@pytest.mark.parametrize(
    ("context", "keys", "said"),
    [
        (4, {"ulysses": 3}, "ulysses: found 3; 1, 2, 4 or left out, for 4 ranks of ds_npu.parallel.context"),
        (4, {"algorithm": "hybrid"}, "ulysses: found null; 2, for 4 ranks of ds_npu.parallel.context with algorithm"),
        (
            8,
            {"ulysses": 2, "window": 3},
            "window: found 3; 1, 2, 4 or left out, for 8 ranks of ds_npu.parallel.context",
        ),
        (4, {"algorithm": "ulysses", "window": 2}, "window: found 2; 1 or left out, for 4 ranks of ds_npu.parallel"),
        (3, {"algorithm": "hybrid"}, 'algorithm: found "hybrid"; another one: the 3 ranks of ds_npu.parallel.context'),
    ],
)
def test_a_wrong_key_is_told_what_would_be_right(context, keys, said):
    (problem,) = wrong_factors(ContextParallelSection(**keys), context)
    assert str(problem).startswith(f"ds_npu.context_parallel.{said}")


@given(KEYS, SIZES)
def test_keys_are_wrong_where_they_leave_no_algorithm(keys, context):
    section = ContextParallelSection(**keys)
    unsaid = section.algorithm == "hybrid" and section.ulysses is None
    assert bool([*wrong_factors(section, context)]) == (unsaid or not algorithms(section, context))


# ---- machine ----


@pytest.mark.parametrize("node", [1, 4, 8, 16])
@pytest.mark.parametrize("tensor", [1, 2, 3, 8])
@pytest.mark.parametrize("context", [1, 2, 3, 4, 6, 8, 16])
def test_context_ranks_of_a_node(context, tensor, node):
    degrees = Degrees(cp=context, tp=tensor, dp=4)
    near = dataclasses.replace(A2, node=node).near(degrees)
    assert context % near == 0
    for group in degrees.groups("cp"):
        for first in range(0, context, near):
            assert len({rank // node for rank in group[first : first + near]}) == 1


def test_a_world_within_a_node_is_near():
    assert A2.near(Degrees(cp=3, dp=2)) == 3 and A2.near(Degrees(cp=3, dp=4)) == 1


def test_machines_are_known_by_their_devices(monkeypatch):
    assert [machine_of(name) for name in ("Ascend910B", "Ascend910_9391", "cpu")] == [A2, A3, A2]
    npu = types.SimpleNamespace(get_device_name=lambda: "Ascend910_9391")
    monkeypatch.setattr(torch, "get_device_module", {"npu": npu}.get)
    assert Build(None, nn.Identity(), device_type="npu").machine == A3
    assert Build(None, nn.Identity(), device_type="cpu").machine == A2
    assert Build(None, nn.Identity(), device_type="npu", is_planned=True).machine == A2
