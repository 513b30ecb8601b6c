"""What stands in for names of accelerate and transformers: they count every process as a data rank.

Some processes share samples. With DeepSpeed, accelerate is the Hugging Face Trainer's way to data. Read in accelerate
1.15 and transformers 5.23.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from ds_npu.engine.announcement import with_section
from ds_npu.engine.asked_twice import check_no_parallelism_config
from ds_npu.topology.degrees import Degrees

Function = Callable[..., Any]


def prepare_data_loader(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def prepared(*args: Any, **kwargs: Any) -> Any:
        bound, degrees = signature.bind(*args, **kwargs), _degrees()
        if degrees is not None:
            place = {"num_processes": degrees.dp, "process_index": degrees.place(dist.get_rank())["dp"]}
            # Where rank 0 reads for all of them, accelerate counts every rank.
            bound.arguments.update(place, dispatch_batches=False, torch_device_mesh=None)
        return original(*bound.args, **bound.kwargs)

    return prepared


def count_data_ranks(original: Function) -> Function:
    """For a function that asks accelerate's state how many processes there are, and means data ranks."""

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with _data_ranks_for_processes():
            return original(*args, **kwargs)

    return counted


def fill_in_for_data_ranks(original: Function) -> Function:
    """For transformers' method that fills in "auto" before there is an Accelerator."""

    @functools.wraps(original)
    def filled_in(self: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        # Asking for it makes the state, where there is none yet.
        state = args.distributed_state
        degrees = None if state is None else _degrees_of(self.config, state)
        with nullcontext() if degrees is None else _counting(degrees, [state]):
            return original(self, args, *rest, **kwargs)

    return filled_in


def validate_parallelism(original: Function) -> Function:
    @functools.wraps(original)
    def validated(self: Any, *args: Any, **kwargs: Any) -> Any:
        degrees = _degrees()
        if degrees is not None:
            check_no_parallelism_config(self._sizes, degrees)
        return original(self, *args, **kwargs)

    return validated


def gather_for_metrics(original: Function) -> Function:
    @functools.wraps(original)
    def gathered(self: Any, *args: Any, **kwargs: Any) -> Any:
        degrees = _degrees()
        if degrees is None:
            return original(self, *args, **kwargs)
        gather, first = self.gather, degrees.groups("dp")[0]

        def gather_once(data: Any) -> Any:
            def of_data_ranks(whole: Any) -> Any:
                return torch.cat([whole.chunk(degrees.world_size)[rank] for rank in first])

            return tree_map(of_data_ranks, gather(data))

        # What it then leaves out of the last batch, it counts in samples.
        self.gather = gather_once
        try:
            return original(self, *args, **kwargs)
        finally:
            del self.gather

    return gathered


def get_state_dict(original: Function) -> Function:
    @functools.wraps(original)
    def whole(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.distributed_type == "DEEPSPEED":
            from ds_npu.engine.weights import WholeWeights

            if isinstance(model, WholeWeights) and model.is_sharded:
                return model.whole_state_dict()
        return original(self, model, *args, **kwargs)

    return whole


def _degrees() -> Degrees | None:
    """The grid of this process's Accelerator, if its config has the section and some of its ranks share samples."""
    from accelerate.state import AcceleratorState, PartialState, is_initialized

    plugin = AcceleratorState().deepspeed_plugin if is_initialized() else None
    return None if plugin is None else _degrees_of(plugin.deepspeed_config, PartialState())


def _degrees_of(ds_config: Any, state: Any) -> Degrees | None:
    """The grid that ``ds_config`` asks for, if some of its ranks share samples; ``state`` is accelerate's."""
    config = with_section(ds_config)
    # On the CPU accelerate may take each process for the only one, and then shares out nothing.
    if config is None or not dist.is_initialized() or state.backend is None:
        return None
    from ds_npu.engine.session import validate

    _, degrees = validate(config)
    return degrees if degrees.dp < degrees.world_size else None


@contextmanager
def _data_ranks_for_processes() -> Iterator[None]:
    degrees = _degrees()
    if degrees is None:
        yield
        return
    # The second is made of the first whenever it is asked for.
    from accelerate.state import AcceleratorState, PartialState

    with _counting(degrees, [PartialState(), AcceleratorState()]):
        yield


@contextmanager
def _counting(degrees: Degrees, states: list[Any]) -> Iterator[None]:
    before = [each.num_processes for each in states]
    for each in states:
        each.num_processes = degrees.dp
    try:
        yield
    finally:
        for each, count in zip(states, before, strict=True):
            each.num_processes = count
