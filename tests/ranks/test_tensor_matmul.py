"""Matrix products in pieces with the collective of sequence parallelism, against one process in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from ds_npu.comm.pending import Pending
from ds_npu.ops.matmul_collective import unmet
from ds_npu.parallel.tensor.axis import MatmulCollectives, SerialCollectives
from ds_npu.parallel.tensor.overlapped_matmul import Fused, Piece, Pipelined, shard_pieces

pytestmark = pytest.mark.slow

C10D, ATEN = torch.ops.c10d, torch.ops.aten
EXACT = {"rtol": 1e-12, "atol": 1e-12}
INNER, OUTER = 5, (4, 3)


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def in_pieces(pieces: int) -> Pipelined:
    return Pipelined(dist.group.WORLD, pieces)


NAMES = {
    C10D._allgather_base_: "gather",
    C10D._reduce_scatter_base_: "scatter",
    ATEN.mm: "product",
    ATEN.addmm_: "product",
    ATEN.bmm: "product",
}


class Calls(TorchDispatchMode):
    """What is asked of torch: collectives, products and copies in their order, bytes sent, elements copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        super().__init__()
        self.order: list[str] = []
        self.sent_bytes = self.copied = 0
        if monkeypatch:
            waiting = Pending.wait

            def wait(pending: Pending) -> torch.Tensor:
                self.order.append("wait")
                return waiting(pending)

            monkeypatch.setattr(Pending, "wait", wait)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = NAMES.get(func.overloadpacket)
        if name:
            self.order.append(name)
        if name in ("gather", "scatter"):
            # The larger side: what each rank gets of the others, or gives to them, is (ranks - 1) / ranks of it.
            self.sent_bytes += max(each.nbytes for each in args[:2])
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (ATEN.clone, ATEN.copy_):
            self.copied += result.numel()
        return result


# ---- how a shard is cut ----


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 12))
def test_pieces_are_every_row_of_every_entry_once(batch, rows, count):
    pieces = shard_pieces(batch, rows, count)
    seen = torch.zeros(batch, rows, dtype=torch.int64)
    for piece in pieces:
        assert piece.shard(seen).numel() > 0
        piece.shard(seen).add_(1)
    assert bool((seen == 1).all())
    if 1 <= count <= rows:
        assert max(1, count // 2) <= len(pieces) <= 2 * count


def test_entries_are_pieces_where_there_are_about_as_many():
    assert shard_pieces(4, 10, 4) == [Piece(slice(entry, entry + 1), slice(0, 10)) for entry in range(4)]
    assert shard_pieces(1, 10, 2) == [Piece(slice(0, 1), slice(0, 5)), Piece(slice(0, 1), slice(5, 10))]
    assert len(shard_pieces(16, 10, 4)) == len(shard_pieces(2, 10, 8)) / 2 == 4
    assert len(shard_pieces(4, 10, 1)) == 1


def counts_body() -> None:
    for rows, pieces in ((1, 1), (4, 4), (16, 8), (400, 8)):
        collectives = Pipelined(dist.group.WORLD, 8)
        with Calls() as calls:
            collectives.gather_matmul(torch.ones(1, rows, 1), [torch.ones(1, 1)])
            collectives.matmul_scatter([(torch.ones(1, 2 * rows, 1), torch.ones(1, 1))]).wait()
        assert calls.order.count("gather") == calls.order.count("scatter") == pieces, rows


def test_a_short_shard_is_cut_into_fewer_pieces():
    run_on_ranks(2, counts_body)


# ---- values ----


def shards(batch: int, rows: int, inner: int) -> list[torch.Tensor]:
    return [numbers(batch, rows, inner, seed=rank) for rank in range(dist.get_world_size())]


def gather_body(make: Callable[[int], Pipelined | Fused]) -> None:
    rank = dist.get_rank()
    matrices = [numbers(INNER, OUTER[0], seed=50 + rank), numbers(OUTER[1], INNER, seed=60 + rank).t()]
    for batch, rows, pieces, count in itertools.product((1, 3), (1, 5, 8), (1, 2, 3, 8), (1, 2)):
        everyones = shards(batch, rows, INNER)
        expected = torch.cat(everyones, dim=1)
        # A shard that is not contiguous is taken, too.
        mine = everyones[rank].transpose(0, 1).contiguous().transpose(0, 1)
        whole, products = make(pieces).gather_matmul(mine, matrices[:count])
        assert torch.equal(whole, expected)
        for product, matrix in zip(products, matrices[:count], strict=True):
            torch.testing.assert_close(product, expected @ matrix, **EXACT)
            assert product.is_contiguous()
        _, again = make(pieces).gather_matmul(mine, matrices[:count], gathered=False)
        assert all(itertools.starmap(torch.equal, zip(again, products, strict=True)))


def scatter_body(make: Callable[[int], MatmulCollectives]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for batch, rows, pieces, count in itertools.product((1, 3), (1, 5, 8), (1, 2, 3, 8), (1, 2)):
        everyones = [
            [
                (
                    numbers(batch, size * rows, INNER + index, seed=10 * each + index),
                    numbers(3, INNER + index, seed=90 + 10 * each + index).t(),
                )
                for index in range(count)
            ]
            for each in range(size)
        ]
        expected = torch.stack([x @ matrix for pairs in everyones for x, matrix in pairs]).sum(0)
        pending = make(pieces).matmul_scatter(everyones[rank])
        found = pending.wait()
        torch.testing.assert_close(found, expected.chunk(size, dim=1)[rank], **EXACT)
        assert found.is_contiguous()
        assert pending.wait() is found


def values_body(make: Callable[[int], MatmulCollectives]) -> None:
    gather_body(make)
    scatter_body(make)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values(world_size):
    run_on_ranks(world_size, values_body, in_pieces)


def bf16_body() -> None:
    """No worse than twice what PyTorch's own product, and sum of rounded products, are from float64."""
    rank, size = dist.get_rank(), dist.get_world_size()
    matrices = [numbers(64, 16, seed=50 + each).bfloat16() for each in range(size)]
    shards_bf16 = [x.bfloat16() for x in shards(2, 24, 64)]
    whole = torch.cat(shards_bf16, dim=1)
    _, (product,) = in_pieces(3).gather_matmul(shards_bf16[rank], [matrices[rank]])
    exact = whole.double() @ matrices[rank].double()
    assert error(product, exact) <= 2 * error(whole @ matrices[rank], exact)
    found = in_pieces(3).matmul_scatter([(whole * (rank + 1), matrices[rank])]).wait()
    exact = torch.stack([(whole * (each + 1)).double() @ matrices[each].double() for each in range(size)]).sum(0)
    plain = sum((whole * (each + 1)) @ matrices[each] for each in range(size))
    here = slice(rank * 24, (rank + 1) * 24)
    assert error(found, exact[:, here]) <= 2 * error(plain[:, here], exact[:, here])


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max())


def test_bf16_is_as_near_as_pytorch():
    run_on_ranks(4, bf16_body)


# ---- what it costs ----


def both(collectives: MatmulCollectives, batch: int, rows: int) -> None:
    """Each of the two, once, with two matrices."""
    size = dist.get_world_size()
    matrices = [torch.ones(INNER, outer) for outer in OUTER]
    collectives.gather_matmul(torch.ones(batch, rows, INNER), matrices)
    x_BSK = torch.ones(batch, size * rows, INNER)
    collectives.matmul_scatter([(x_BSK, torch.ones(INNER, 4)), (x_BSK, torch.ones(INNER, 4))]).wait()


def bytes_body() -> None:
    for batch, rows in itertools.product((1, 3), (1, 5, 8)):
        sent = []
        for collectives in (SerialCollectives(dist.group.WORLD), *map(in_pieces, (1, 2, 3, 8))):
            with Calls() as calls:
                both(collectives, batch, rows)
            sent.append(calls.sent_bytes)
        elements = dist.get_world_size() * batch * rows
        # One gather of x [B, S, K] and one scatter of [B, S, N].
        assert sent == [4 * elements * (INNER + 4)] * 5, (batch, rows, sent)


@pytest.mark.parametrize("world_size", [2, 4])
def test_pieces_send_no_byte_more(world_size):
    run_on_ranks(world_size, bytes_body)


def copies_body() -> None:
    """Of a batch of one each result is copied once to its place, as is each operand of a scatter; of more, nothing."""
    rows, size = 6, dist.get_world_size()
    tokens = rows * size
    for batch, pieces, copied in (
        (1, 1, 0),
        (1, 3, tokens * (INNER + sum(OUTER)) + 2 * tokens * INNER),
        (3, 3, 0),
    ):
        with Calls() as calls:
            both(in_pieces(pieces), batch, rows)
        # gloo itself copies what it has summed up, at the end of each reduce-scatter.
        assert calls.copied - batch * rows * 4 == copied, (batch, pieces, calls.copied, copied)


def test_what_is_copied():
    run_on_ranks(2, copies_body)


def order_body() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch, Calls(monkeypatch) as calls:
        in_pieces(3).gather_matmul(torch.ones(1, 6, INNER), [torch.ones(INNER, 4)])
        gathering = list(calls.order)
        calls.order.clear()
        pending = in_pieces(3).matmul_scatter([(torch.ones(1, 12, INNER), torch.ones(INNER, 4))])
        scattering = list(calls.order)
        pending.wait()
    assert gathering == ["gather", *["wait", "gather", "product"] * 2, "wait", "product"]
    assert scattering == ["product", "scatter"] * 3


def test_a_piece_is_in_flight_while_the_next_is_multiplied():
    run_on_ranks(2, order_body)


# ---- what is refused ----


def length_body() -> None:
    with pytest.raises(ValueError, match=r"dim 1 of \(1, 3, 2\), the sequence, does not divide by the group's 2 ranks"):
        in_pieces(2).matmul_scatter([(torch.ones(1, 3, 2), torch.ones(2, 2))])


def test_a_sequence_that_does_not_divide_is_refused():
    run_on_ranks(2, length_body)


HALF = (torch.float16, torch.float16)


@pytest.mark.parametrize(
    ("operands", "reason"),
    [
        (("cpu", HALF, 256, 2), "the tensors are on cpu; the kernels are for NPUs"),
        (("npu", HALF, 256, 3), "the group has 3 ranks; the kernels are for 2, 4 or 8"),
        (("npu", HALF, 255, 2), "the inner dimension is 255; the kernels take 256 to 65534"),
        (("npu", HALF, 65535, 2), "the inner dimension is 65535; the kernels take 256 to 65534"),
        (
            ("npu", (torch.float32, torch.float32), 256, 2),
            "torch.float32 is multiplied with torch.float32; the kernels take two torch.float16 or two torch.bfloat16",
        ),
        (
            ("npu", (torch.float16, torch.bfloat16), 256, 2),
            "torch.float16 is multiplied with torch.bfloat16; the kernels take two torch.float16 or two torch.bfloat16",
        ),
        (("npu", HALF, 256, 8), None),
        (("npu", (torch.bfloat16, torch.bfloat16), 65534, 4), None),
    ],
)
def test_why_a_kernel_is_not_used(operands, reason):
    assert unmet(*operands) == reason
