"""The names inside of ds_npu that goldens need, found in any module; one that is renamed is changed here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest import mock

SIZES = {"CHUNK": 4096, "LEAST_BYTES": 1, "LEAST_TOKENS": 8}
"""Constants of ds_npu's modules, and values with which a tiny model is treated as a large one.

They are the elements of a piece of the optimizer's state, the bytes from which a tensor is swapped, and the fewest
tokens of a loss's chunk that a plan chooses.
"""
FASTEST = "fastest_way"
"""A function of the estimated seconds by way of overlap: the key of the one that is taken."""
SERIAL = 1
"""Its key for no overlap, and the others are a kernel (0) or a number of pieces."""
BACKWARD_THREADS = "ds_npu backward"
"""The beginning of the names of threads in which backwards run beside a forward (``pipeline.overlap_experts``)."""
OPERATORS = "ds_npu.ops."
"""Modules whose limits are those of kernels."""


ACCESS = "allow_shard_access"
"""A context manager in which code that is not ds_npu's takes shards of weights."""


def _loaded() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith("ds_npu.")]


@contextmanager
def small_sizes() -> Iterator[None]:
    """Replace SIZES in all modules of ds_npu that are loaded."""
    loaded = _loaded()
    with ExitStack() as stack:
        holders = [each for each in loaded if FASTEST in vars(each)]
        assert holders, f"no module of ds_npu has {FASTEST}: what is it called now?"
        for module in holders:
            stack.enter_context(mock.patch.object(module, FASTEST, _most_pieces))
        for name, value in SIZES.items():
            holders = [each for each in loaded if name in vars(each) and not each.__name__.startswith(OPERATORS)]
            assert holders, f"no module of ds_npu has {name}: what is it called now?"
            for module in holders:
                stack.enter_context(mock.patch.object(module, name, value))
        yield


def _most_pieces(seconds: Mapping[int, float]) -> int:
    """The most pieces, where a way of overlap was asked for; messages of a tiny model would not be sent in pieces."""
    return SERIAL if SERIAL in seconds else max(seconds)


@contextmanager
def fused_kernels() -> Iterator[None]:
    """Let the kernels of ``moe.dispatcher`` fused be computed on the CPU; no simulated NPU has their 8 ranks."""
    # It stands beside the dispatcher and moves with it, so only the case that needs it imports it.
    from fused_experts import stand_in

    from ds_npu.ops import expert_exchange

    def of_shards(kernel: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            with allow_shard_access():
                return kernel(*args)

        return call

    (allow_shard_access,) = {vars(each)[ACCESS] for each in _loaded() if ACCESS in vars(each)}
    with stand_in() as kernels, mock.patch.object(expert_exchange, "why_not_fused", lambda: None):
        for name in ("alltoall_matmul", "matmul_alltoall"):
            setattr(kernels, name, of_shards(getattr(kernels, name)))
        yield


def say_warnings_again() -> None:
    """Let what is warned of once in a process be said again."""
    for module in _loaded():
        if "warn_once" in vars(module):
            module.warn_once.cache_clear()
