"""Estimates of products with collectives, against sums by hand, and the way that is taken."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_npu.parallel.tensor.overlap_cost import FUSED, PIECES, SERIAL, OverlapCall, fastest_way, seconds_by_way
from ds_npu.topology.machine import A2, MACHINES

# One core computes a tile of 128 x 256 numbers with 1 inner dimension in 65,536 / matmul seconds.
MACHINE = replace(
    A2,
    cores=1,
    matmul=1e9,
    memory=((1, 1e30),),
    kernel=1.0,
    message=2.0,
    node=8,
    port=4.0,
    link=4.0,
    network=1.0,
    hop=0.0,
)


def tiles(count: int, inner: int) -> float:
    return count * 2 * 128 * 256 * inner / 1e9


def test_a_gather_in_pieces():
    # [2 x 128, 100] x [100, 256] of two ranks.
    call = OverlapCall("all_gather", 2, 1, 128, ((100, 256),), 2)
    found = seconds_by_way(call, MACHINE, has_fused=True)
    whole, message = 2 * 128 * 100 * 2, 2.0 + 2 * 128 * 100 * 2 / 2 / 4
    assert call.whole_bytes == whole
    assert found[SERIAL] == pytest.approx(message + 1 + tiles(2, 100))
    # A message of half the bytes, and half of the rows: one tile. The halves are copied to where they belong.
    half, product = 2 + (message - 2) / 2, 1 + tiles(1, 100) + 1 + 1
    assert found[2] == pytest.approx(half + max(half, product) + product)
    assert found[FUSED] == pytest.approx(1 + max(message, tiles(2, 100)))


def test_the_host_launches_each_piece():
    call = OverlapCall("all_gather", 2, 1, 128, ((100, 256),), 2)
    slow = replace(MACHINE, dispatch=1e6, dispatch_collective=1e7)
    # A message, a product, and copies of the product and of what was gathered.
    assert seconds_by_way(call, slow, False)[2] == pytest.approx(2 * (1e7 + 3e6))
    assert seconds_by_way(call._replace(gathered=False), slow, False)[SERIAL] == pytest.approx(1e7 + 1e6)


def test_samples_are_pieces_without_copies():
    call = OverlapCall("all_gather", 2, 4, 128, ((100, 256),), 2)
    found = seconds_by_way(call, MACHINE, has_fused=False)
    part, product = 2 + 128 * 100 * 2 / 4, 1 + tiles(2, 100)
    assert found[4] == pytest.approx(part + 3 * max(part, product) + product) and not {2, 8} & set(found)
    assert {3, 8} <= set(seconds_by_way(call._replace(batch=3), MACHINE, has_fused=False))


def test_a_scatter_hides_behind_products_that_follow():
    call = OverlapCall("reduce_scatter", 2, 1, 128, ((1000, 256), (1000, 256)), 2)
    message, products = 2.0 + 2 * 128 * 256 * 2 / 2 / 4, 2 * (1 + tiles(2, 1000))
    assert seconds_by_way(call, MACHINE, False)[SERIAL] == pytest.approx(message + products)
    slow = replace(MACHINE, port=1e9, link=1e9)
    assert seconds_by_way(call._replace(hides=True), slow, False)[SERIAL] == pytest.approx(products)
    assert seconds_by_way(call._replace(hides=True), MACHINE, False)[SERIAL] == pytest.approx(
        products + max(0.0, message - products)
    )


def test_kernels_do_not_leave_a_node():
    call = OverlapCall("all_gather", 16, 1, 128, ((256, 256),), 2)
    assert FUSED not in seconds_by_way(call, A2, has_fused=True)
    assert FUSED in seconds_by_way(call._replace(ranks=8), A2, has_fused=True)


def test_the_fastest_that_is_worth_it():
    assert fastest_way({SERIAL: 1.0, 2: 0.98, FUSED: 0.99}) == SERIAL
    assert fastest_way({SERIAL: 1.0, 2: 0.9, FUSED: 0.95}) == 2
    assert fastest_way({2: 3.0, 4: 2.0}) == 4


@given(
    st.sampled_from(["all_gather", "reduce_scatter"]),
    st.tuples(*(st.integers(1, 4096) for _ in range(4))),
    st.sampled_from([2, 4, 8]),
    st.booleans(),
    st.sampled_from(list(MACHINES.values())),
)
def test_no_way_is_faster_than_its_products_or_its_message(collective, sizes, ranks, hides, machine):
    batch, rows, inner, outer = sizes
    call = OverlapCall(collective, ranks, batch % 8 + 1, rows, ((inner, outer),), 2, hides=hides)
    found = seconds_by_way(call, machine, has_fused=True)
    assert set(found) <= {SERIAL, FUSED, call.batch, *PIECES} and SERIAL in found
    product = machine.product_seconds(call.batch * rows * ranks, outer, inner, 2)
    message = call.whole_bytes * (ranks - 1) / ranks / min(machine.port, machine.link * (ranks - 1))
    for way, seconds in found.items():
        assert math.isfinite(seconds)
        assert seconds >= 0.999 * (product if hides and way != FUSED else max(product, message)), way
