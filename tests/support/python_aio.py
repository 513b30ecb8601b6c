"""DeepSpeed's asynchronous files in plain Python, where libaio is not there to compile them with.

Reads and writes are done when they are waited for, and not before, so that a reader that does not wait finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from deepspeed.runtime.swap_tensor import (
    optimizer_utils,
    partitioned_optimizer_swapper,
    partitioned_param_swapper,
    pipelined_optimizer_swapper,
)

SWAPPED_BYTES = 5632
"""The least size of what is swapped within ``python_files``; DeepSpeed's is 1 MiB."""
CONFIG = {"aio": {"block_size": SWAPPED_BYTES}}


class PythonFiles:
    """The part of DeepSpeed's ``aio_handle`` that swapped states need."""

    def __init__(self, **settings: object) -> None:
        self._asked: list = []
        self._locked: set[int] = set()

    def async_pread(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        self._asked.append(lambda: _read(buffer, Path(path)))
        return 0

    def async_pwrite(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        self._asked.append(lambda: Path(path).write_bytes(_bytes(buffer)))
        return 0

    def wait(self) -> int:
        asked, self._asked = self._asked, []
        for each in asked:
            each()
        return len(asked)

    def new_cpu_locked_tensor(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        made = torch.empty(numel, dtype=like.dtype)
        self._locked.add(made.untyped_storage().data_ptr())
        return made

    def free_cpu_locked_tensor(self, x: torch.Tensor) -> None:
        self._locked.discard(x.untyped_storage().data_ptr())

    def is_pinned(self, x: torch.Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self._locked


def _bytes(x: torch.Tensor) -> bytes:
    return x.detach().contiguous().view(torch.uint8).numpy().tobytes()


def _read(buffer: torch.Tensor, path: Path) -> None:
    held = path.read_bytes()
    wanted = buffer.numel() * buffer.element_size()
    assert len(held) >= wanted, (path, len(held), wanted)
    buffer.view(torch.uint8).copy_(torch.frombuffer(bytearray(held[:wanted]), dtype=torch.uint8))


@contextmanager
def python_files() -> Iterator[None]:
    """Within it DeepSpeed swaps optimizer states by Python, of 5,632 bytes or more."""
    operator = SimpleNamespace(load=lambda **given: SimpleNamespace(aio_handle=PythonFiles))
    with ExitStack() as stack:
        for module in (partitioned_optimizer_swapper, pipelined_optimizer_swapper, partitioned_param_swapper):
            stack.enter_context(mock.patch.object(module, "AsyncIOBuilder", lambda: operator))
        stack.enter_context(mock.patch.object(optimizer_utils, "MIN_AIO_BYTES", SWAPPED_BYTES))
        yield
