"""The Ulysses exchange: which heads each rank gets, and that every rank gets them, bit for bit, and nothing else."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchange_cases import CASES, Case, attend, attention, heads_of, mine_of, one_process
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ds_npu.comm.pending import Pending
from ds_npu.parallel.context.ulysses import UlyssesAllToAll, post_to_heads, post_to_tokens, share_heads

WORLD_SIZES = (2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4)))

# ---- which heads ----


@st.composite
def shared(draw: Callable) -> tuple[int, int, int]:
    """Query heads, key and value heads, ranks."""
    kv_heads, share = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    return kv_heads * share, kv_heads, draw(st.integers(1, min(kv_heads * share, 12)))


@given(shared())
def test_every_query_head_is_one_ranks_and_finds_its_key(drawn):
    query_heads, kv_heads, ranks = drawn
    heads = share_heads(query_heads, kv_heads, ranks)
    assert [head for mine in heads.queries for head in mine] == list(range(query_heads))
    sizes = sorted(map(len, heads.queries))
    assert sizes[0] >= sizes[-1] - 1
    for rank, (queries, keys) in enumerate(zip(heads.queries, heads.keys, strict=True)):
        used = [head * kv_heads // query_heads for head in queries]
        assert set(keys) == set(used)
        repeated = heads.key_head_indices(rank)
        shares = {used.count(key) for key in keys}
        assert (repeated is None) == (len(shares) == 1)
        if repeated is not None:
            assert [keys[place] for place in repeated] == used


def test_heads_by_hand():
    few = share_heads(8, 2, 4)
    assert few.queries == (range(2), range(2, 4), range(4, 6), range(6, 8))
    assert few.keys == (range(1), range(1), range(1, 2), range(1, 2))
    assert share_heads(4, 1, 3).keys == (range(1), range(1), range(1))
    uneven = share_heads(7, 7, 3)
    assert uneven.queries == uneven.keys == (range(3), range(3, 5), range(5, 7))
    crossing = share_heads(6, 3, 2)
    assert crossing.keys == (range(2), range(1, 3))
    assert [crossing.key_head_indices(rank) for rank in range(2)] == [(0, 0, 1), (0, 1, 1)]


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(ValueError, match=r"3 query heads .* by 4 ranks of ds_npu\.context_parallel\.ulysses"):
        share_heads(3, 3, 4)
    with pytest.raises(ValueError, match="6 query heads cannot share 4 key and value heads evenly"):
        share_heads(6, 4, 2)


# ---- the exchange ----


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def values_body() -> None:
    for case, dtype in itertools.product(CASES, DTYPES):
        sources = list(zip(case.exchanges, case.whole(dtype), strict=True))
        flying = [exchange.to_heads(mine_of(x, exchange)) for exchange, x in sources]
        for (exchange, x), pending in zip(sources, flying, strict=True):
            found = pending.wait()
            assert found.dtype == dtype
            assert torch.equal(found, heads_of(x, exchange)), case
            assert found.transpose(0, 1).is_contiguous()
        exchange, x = sources[0]
        for out in (heads_of(x, exchange).contiguous(), flying[0].wait(), heads_of(x, exchange)):
            back = exchange.to_tokens(out).wait()
            assert torch.equal(back, mine_of(x, exchange)), case
            assert back.is_contiguous()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_values(world_size):
    run_on_ranks(world_size, values_body)


def sums_body() -> None:
    """Heads that several ranks had: 256 and three ones are 260 in bfloat16, if they are not rounded after each."""
    ranks = dist.get_world_size()
    exchange = UlyssesAllToAll(dist.group.WORLD, dist.get_rank(), (2,) * ranks, (range(2),) * ranks)
    for dtype, unit in ((torch.bfloat16, 256.0), (torch.float16, 2048.0), (torch.float64, 2.0**53)):
        given_ = unit if exchange.rank == 0 else 1.0
        found = exchange.to_tokens(torch.full((2, 2 * ranks, 2, 3), given_, dtype=dtype)).wait()
        total = torch.tensor(unit, dtype=torch.promote_types(dtype, torch.float32))
        for _ in range(ranks - 1):
            total += 1
        assert found.dtype == dtype
        assert torch.equal(found, total.to(dtype).expand(found.shape)), (dtype, found)


def test_heads_that_several_ranks_had_are_summed_in_float32():
    run_on_ranks(4, sums_body)


# ---- gradients ----


def again(case: Case, reentrant: bool) -> Callable[..., torch.Tensor]:
    return lambda *inputs: checkpoint(attend, case, *inputs, use_reentrant=reentrant)


def gradients_body() -> None:
    for case in CASES:
        out, grad, grads = one_process(case)
        out, grad = (mine_of(x, case.exchanges[0]) for x in (out, grad))
        for run in (lambda *inputs, case=case: attend(case, *inputs), again(case, True), again(case, False)):
            inputs = [
                mine_of(x, exchange).requires_grad_() for x, exchange in zip(case.whole(), case.exchanges, strict=True)
            ]
            found = run(*inputs)
            assert torch.equal(found, out), case
            found.backward(grad)
            for x, exchange, expected in zip(inputs, case.exchanges, grads, strict=True):
                assert torch.equal(x.grad, mine_of(expected, exchange)), case


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gradients(world_size):
    run_on_ranks(world_size, gradients_body)


def graphs_body() -> None:
    """Inputs without gradients, no graph at all, a graph that is used twice, results that nobody uses."""
    case = CASES[2]
    out, grad, grads = one_process(case)
    exchanges = case.exchanges
    inputs = [mine_of(x, exchange) for x, exchange in zip(case.whole(), exchanges, strict=True)]
    wanted = [mine_of(x, exchange) for x, exchange in zip(grads, exchanges, strict=True)]
    expected, grad = mine_of(out, exchanges[0]), mine_of(grad, exchanges[0])

    assert torch.equal(attend(case, *inputs), expected)
    with torch.no_grad():
        found = attend(case, *[x.clone().requires_grad_() for x in inputs])
    assert torch.equal(found, expected)
    assert not found.requires_grad

    for number in range(3):
        some = [x.clone().requires_grad_(place == number) for place, x in enumerate(inputs)]
        attend(case, *some).backward(grad)
        assert [x.grad is not None for x in some] == [place == number for place in range(3)]
        assert torch.equal(some[number].grad, wanted[number])

    twice = [x.clone().requires_grad_() for x in inputs]
    found = attend(case, *twice)
    for retain in (True, False):
        assert all(map(torch.equal, torch.autograd.grad(found, twice, grad, retain_graph=retain), wanted))

    unused = [x.clone().requires_grad_() for x in inputs]
    q, *_ = [post_to_heads(x, exchange).wait() for x, exchange in zip(unused, exchanges, strict=True)]
    (q * q).sum().backward()
    assert torch.equal(unused[0].grad, 2 * inputs[0])
    assert unused[1].grad is None and unused[2].grad is None


def test_graphs():
    run_on_ranks(2, graphs_body)


class NoneOnFirst(torch.autograd.Function):
    """On rank 0 the gradient is None, elsewhere ones."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
        return None if dist.get_rank() == 0 else grad.expand(ctx.shape)


def none_body() -> None:
    """The other ranks' gradients come back all the same: nobody waits for a rank that has none."""
    exchange = UlyssesAllToAll(dist.group.WORLD, dist.get_rank(), (2, 1), (range(2), range(2, 3)))
    x = torch.ones(1, exchange.counts[exchange.rank], 3, 2, requires_grad=True)
    NoneOnFirst.apply(post_to_heads(x, exchange).wait()).backward()
    assert x.grad[:, :, :2].eq(0).all()
    assert x.grad[:, :, 2:].eq(1).all()


def test_a_gradient_that_is_none():
    run_on_ranks(2, none_body)


def refusals_body() -> None:
    exchange = UlyssesAllToAll(dist.group.WORLD, dist.get_rank(), (3, 2), (range(2), range(2, 3)))
    with pytest.raises(
        ValueError, match=rf"rank {exchange.rank} of a .* 2 exchanges \[B, {3 - exchange.rank} tokens, 3 "
    ):
        exchange.to_heads(torch.ones(1, 4, 3, 2))
    with pytest.raises(ValueError, match=r"5 tokens, . heads, D\]; found \(1, 5, 3, 2\)"):
        exchange.to_tokens(torch.ones(1, 5, 3, 2))
    flying = post_to_heads(torch.ones(1, 3 - exchange.rank, 3, 2), exchange)
    flying.wait()
    with pytest.raises(RuntimeError, match="wait was called before"):
        flying.wait()
    x = torch.ones(1, 3 - exchange.rank, 3, 2, requires_grad=True)
    arrived = post_to_heads(x, exchange).wait()
    (grad,) = torch.autograd.grad((arrived * arrived).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_what_cannot_be_done_is_refused():
    run_on_ranks(2, refusals_body)


def test_a_rank_alone_gets_its_own_tensor():
    exchange = UlyssesAllToAll(None, 0, (3,), (range(4),))
    x = torch.ones(2, 3, 4, 5, requires_grad=True)
    assert exchange.to_heads(x).wait() is x and exchange.to_tokens(x).wait() is x
    assert post_to_heads(x, exchange).wait() is x and post_to_tokens(x, exchange).wait() is x


# ---- what is sent, copied and kept ----


class Messages(TorchDispatchMode):
    """The elements that each all-to-all sends to each rank, and the elements written by copies before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[list[int]] = []
        self.copied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            assert func is torch.ops.c10d.alltoall_base_.default
            self.sent.append(args[4])
        elif isinstance(found, torch.Tensor) and not func.is_view and "empty" not in str(func):
            self.copied += found.numel()
        return found


def messages_body() -> None:
    """Every rank is sent the heads it needs, once; they are copied once here, and not there."""
    for case in CASES:
        for exchange, x in zip(case.exchanges, case.whole(torch.float32), strict=True):
            mine, ours = mine_of(x, exchange), heads_of(x, exchange)
            to_each = [mine[:, :, heads.start : heads.stop].numel() for heads in exchange.heads]
            from_each = [part.numel() for part in torch.split(ours, exchange.counts, dim=1)]
            with Messages() as seen:
                arrived = exchange.to_heads(mine).wait()
            assert (seen.sent, seen.copied) == ([to_each], sum(to_each)), case
            with Messages() as seen:
                exchange.to_tokens(arrived).wait()
            assert (seen.sent, seen.copied) == ([from_each], sum(to_each)), case
            if case.batch > 1:
                batch_first = ours.contiguous()
                with Messages() as seen:
                    exchange.to_tokens(batch_first).wait()
                assert (seen.sent, seen.copied) == ([from_each], sum(from_each) + sum(to_each)), case


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_only_what_is_needed_is_sent_and_copied(world_size):
    run_on_ranks(world_size, messages_body)


def kept_body() -> None:
    """What has arrived lives as long as whoever took it; nothing waits for the garbage collector."""
    case = CASES[2]
    exchange = case.exchanges[0]
    gc.disable()
    x = mine_of(case.whole()[0], exchange).requires_grad_()
    flying = post_to_heads(x * 1, exchange)
    arrived = flying.wait()
    total = arrived.sum()
    storage, buffer, posted = (weakref.ref(each) for each in (arrived.untyped_storage(), flying._buffer, flying))
    del arrived, flying
    # gloo's thread may hold a message for a moment after it was received.
    deadline = time.monotonic() + 10
    while storage() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [each() is None for each in (storage, buffer, posted)] == [True, False, True]
    total.backward()
    del total
    assert buffer() is None
    gc.enable()


def test_nothing_is_kept():
    run_on_ranks(2, kept_body)


# ---- order ----


@dataclass(frozen=True)
class Recorded(UlyssesAllToAll):
    """Writes down when it sends and when it waits."""

    name: str
    events: list[str]

    def to_heads(self, x: torch.Tensor) -> Pending[torch.Tensor]:
        return self._recorded(super().to_heads(x), self.name)

    def to_tokens(self, x: torch.Tensor) -> Pending[torch.Tensor]:
        return self._recorded(super().to_tokens(x), f"d{self.name}")

    def _recorded(self, pending: Pending, name: str) -> Pending:
        self.events.append(f"send {name}")
        return Pending(None, None, lambda _: self.events.append(f"wait {name}") or pending.wait())


class Products(TorchDispatchMode):
    """Writes down every product with a projection's weight, forward and backward."""

    def __init__(self, layers: dict[str, nn.Linear], events: list[str]) -> None:
        super().__init__()
        self.names = {layer.weight.data_ptr(): name for name, layer in layers.items()}
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default and args[1].data_ptr() in self.names:
            self.events.append(self.names[args[1].data_ptr()])
        return func(*args, **(kwargs or {}))


def order_body(checkpointed: bool) -> None:
    """Every all-to-all is sent before the next projection and waited for where its result is needed."""
    case = CASES[0]
    events: list[str] = []
    layers = {f"{name}_proj": nn.Linear(8, 16, bias=False) for name in "qkv"}
    exchanges = [
        Recorded(each.group, each.rank, each.counts, each.heads, name, events)
        for each, name in zip(case.exchanges, "qkv", strict=True)
    ]

    def attend(x: torch.Tensor) -> torch.Tensor:
        flying = [
            post_to_heads(layer(x).unflatten(2, (4, 4)), exchange)
            for layer, exchange in zip(layers.values(), exchanges, strict=True)
        ]
        return attention(*[each.wait() for each in flying], None)

    x = torch.ones(1, case.counts[0], 8, requires_grad=True)
    forward = ["q_proj", "send q", "k_proj", "send k", "v_proj", "send v", "wait q", "wait k", "wait v"]
    backward = ["wait dv", "v_proj", "wait dk", "k_proj", "wait dq", "q_proj"]
    with Products(layers, events):
        out = checkpoint(attend, x, use_reentrant=False) if checkpointed else attend(x)
        assert events == forward
        out.sum().backward()
    recomputed = forward if checkpointed else []
    assert events[9 : 9 + len(recomputed)] == recomputed
    rest = events[9 + len(recomputed) :]
    assert sorted(rest[:3]) == ["send dk", "send dq", "send dv"]
    assert rest[3:] == backward


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_exchanges_run_while_the_projections_do(checkpointed):
    run_on_ranks(2, order_body, checkpointed)
