"""What events say of small programs on one simulated NPU: a line of JSON, microseconds by name of a program."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

SIDE = 2048
"""Of the square matrices whose product takes longer than the host needs to dispatch it."""
SMALL = 1 << 20
"""Elements of the tensor that takes less."""


def event() -> torch.npu.Event:
    return torch.npu.Event(enable_timing=True)


def timed(program: Callable[[], None]) -> float:
    """Microseconds between an event before ``program``, on an idle NPU, and one after it."""
    program()
    torch.npu.synchronize()
    begun, ended = event(), event()
    begun.record()
    program()
    ended.record()
    torch.npu.synchronize()
    return begun.elapsed_time(ended) * 1e3


def repeated(count: int, call: Callable[..., object], *args: object, **options: object) -> None:
    for _ in range(count):
        call(*args, **options)


def main() -> None:
    x = torch.ones(SIDE, SIDE, dtype=torch.bfloat16, device="npu")
    out, other = torch.empty_like(x), torch.empty_like(x)
    small = torch.ones(SMALL, dtype=torch.bfloat16, device="npu")
    stream, main_stream = torch.npu.Stream(), torch.npu.current_stream()

    def products(count: int, into: torch.Tensor) -> None:
        repeated(count, torch.mm, x, x, out=into)

    def fork(here: int, there: int) -> Callable[[], None]:
        def program() -> None:
            products(1, out)
            stream.wait_stream(main_stream)
            with torch.npu.stream(stream):
                products(there, other)
            products(here, out)
            main_stream.wait_stream(stream)

        return program

    old = event()
    old.record()

    leaf = torch.ones(SMALL, dtype=torch.bfloat16, device="npu", requires_grad=True)
    y = leaf
    for _ in range(20):
        y = y * 3
    gradient = torch.ones_like(y)

    def asks() -> None:
        products(1, out)
        done = event()
        done.record()
        while not done.query():
            pass

    print(
        json.dumps(
            {
                "adds": timed(lambda: repeated(10, small.add_, 1)),
                "products": timed(lambda: products(5, out)),
                "longer here": timed(fork(3, 1)),
                "longer there": timed(fork(1, 3)),
                "waits": timed(lambda: repeated(100, main_stream.wait_event, old)),
                "backward": timed(lambda: y.backward(gradient, retain_graph=True)),
                "asks": timed(asks),
            }
        )
    )


if __name__ == "__main__":
    main()
