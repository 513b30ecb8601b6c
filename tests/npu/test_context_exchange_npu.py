"""The Ulysses exchange between NPUs, in both directions and with its gradients, to the bit."""

from __future__ import annotations

import pytest
import torch
from exchange_cases import CASES, attend, heads_of, mine_of, one_process
from ranks import run_on_ranks


def values_body() -> None:
    for case in CASES:
        sources = list(zip(case.exchanges, case.whole(torch.bfloat16), strict=True))
        flying = [exchange.to_heads(mine_of(x, exchange).npu()) for exchange, x in sources]
        for (exchange, x), pending in zip(sources, flying, strict=True):
            assert torch.equal(pending.wait().cpu(), heads_of(x, exchange)), case
        exchange, x = sources[0]
        assert torch.equal(exchange.to_tokens(flying[0].wait()).wait().cpu(), mine_of(x, exchange)), case


def gradients_body() -> None:
    for case in CASES:
        exchanges = case.exchanges
        out, grad, grads = one_process(case)
        whole = zip(case.whole(torch.float32), exchanges, strict=True)
        inputs = [mine_of(x, exchange).npu().requires_grad_() for x, exchange in whole]
        found = attend(case, *inputs)
        found.backward(mine_of(grad, exchanges[0]).float().npu())
        assert torch.equal(found.cpu().double(), mine_of(out, exchanges[0])), case
        for x, exchange, expected in zip(inputs, exchanges, grads, strict=True):
            assert torch.equal(x.grad.cpu().double(), mine_of(expected, exchange)), case


@pytest.mark.parametrize("body", [values_body, gradients_body])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_exchange(world_size, body):
    run_on_ranks(world_size, body, backend="hccl")
