"""Marks of calls of torch.distributed in a trace of the CPU, whose own events do not name the process group."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

from ds_npu.parallel.runtime.calls import Arguments, Keywords, Operation
from ds_npu.step_time.torch_trace import MARK


class MarkedCalls(TorchFunctionMode):
    """While it is entered, each call of torch.distributed on this thread is a range named by its process group."""

    def __torch_function__(
        self,
        func: Operation,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", "") != c10d.__name__:
            return func(*args, **named)
        with torch.profiler.record_function(_mark(func, args, named)):
            return func(*args, **named)


def _mark(func: Operation, args: Arguments, kwargs: Keywords) -> str:
    found = _signature(func).bind(*args, **kwargs).arguments
    group = found.get("group") or dist.group.WORLD
    assert group is not None
    return f"{MARK}{func.__name__} {group.group_name}"


@functools.cache
def _signature(func: Operation) -> inspect.Signature:
    return inspect.signature(func)


def process_groups() -> dict[str, tuple[int, ...]]:
    """The global ranks of each process group of this rank, by its name."""
    return {name: tuple(dist.get_process_group_ranks(group)) for group, name in c10d._world.pg_names.items()}
