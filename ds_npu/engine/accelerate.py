"""What stands in for names of accelerate and transformers: they count every process as a data rank.

Some processes share samples. With DeepSpeed, accelerate is the Hugging Face Trainer's way to data. Read in accelerate
1.15 and transformers 5.23.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
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
        degrees = None if state is None else degrees_of(self.config, state)
        with nullcontext() if degrees is None else counting(degrees, [state]):
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


def seed_of_data_rank(original: Function) -> Function:
    """For the function that gives each process another seed, from which it draws samples of what is generated."""

    @functools.wraps(original)
    def seeded(seed: int, device_specific: bool = False, *args: Any, **kwargs: Any) -> Any:
        degrees = _degrees() if device_specific else None
        if degrees is None:
            return original(seed, device_specific, *args, **kwargs)
        return original(seed + degrees.place(dist.get_rank())["dp"], False, *args, **kwargs)

    return seeded


def gather_for_metrics(original: Function) -> Function:
    @functools.wraps(original)
    def gathered(self: Any, *args: Any, **kwargs: Any) -> Any:
        degrees = _degrees()
        if degrees is None:
            return original(self, *args, **kwargs)
        gather = self.gather

        def gather_once(data: Any) -> Any:
            return _once(gather(data), degrees)

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
    return None if plugin is None else degrees_of(plugin.deepspeed_config, PartialState())


def degrees_of(ds_config: Any, state: Any) -> Degrees | None:
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
    with nullcontext() if degrees is None else counting(degrees, _states()):
        yield


def _states() -> list[Any]:
    from accelerate.state import AcceleratorState, PartialState

    # The second is made of the first whenever it is asked for.
    return [PartialState(), AcceleratorState()]


@contextmanager
def counting(degrees: Degrees, states: list[Any]) -> Iterator[None]:
    """Meanwhile accelerate's ``states`` count the data ranks in place of the processes."""
    with _showing(states, degrees.dp, None):
        yield


@contextmanager
def _showing(states: list[Any], count: int, index: int | None) -> Iterator[None]:
    """Meanwhile ``states`` show ``count`` processes, of which this one is ``index`` (None: as before)."""
    before = [(each.num_processes, each.process_index) for each in states]
    for each in states:
        each.num_processes = count
        each.process_index = each.process_index if index is None else index
    try:
        yield
    finally:
        for each, (number, place) in zip(states, before, strict=True):
            each.num_processes, each.process_index = number, place


_JOINED: ContextVar[Degrees | None] = ContextVar("_JOINED", default=None)
"""The grid of whose data ranks accelerate's gather() joins the tensors; None: it joins those of all processes."""


@contextmanager
def data_ranks_as_processes() -> Iterator[None]:
    """Meanwhile accelerate's processes are the data ranks: how many, which one this is, and what is gathered."""
    degrees = _degrees()
    if degrees is None or _JOINED.get() is not None:
        yield
        return
    token = _JOINED.set(degrees)
    try:
        with _showing(_states(), degrees.dp, degrees.place(dist.get_rank())["dp"]):
            yield
    finally:
        _JOINED.reset(token)


def gather_of_data_ranks(original: Function) -> Function:
    """For accelerate's function that joins the tensors of all processes."""

    @functools.wraps(original)
    def gathered(tensor: Any) -> Any:
        degrees = _JOINED.get()
        if degrees is None:
            return original(tensor)
        with _showing(_states(), degrees.world_size, dist.get_rank()):
            return _once(original(tensor), degrees)

    return gathered


def gather_objects_of_data_ranks(original: Function) -> Function:
    """For accelerate's function that joins the lists of all processes."""

    @functools.wraps(original)
    def gathered(objects: Any) -> Any:
        degrees = _JOINED.get()
        if degrees is None:
            return original(objects)
        with _showing(_states(), degrees.world_size, dist.get_rank()):
            lists = original([objects])
        return [each for rank in degrees.groups("dp")[0] for each in lists[rank]]

    return gathered


def _once(gathered: Any, degrees: Degrees) -> Any:
    """Of what each process has given, that of one process for each data rank."""

    def of_data_ranks(whole: Any) -> Any:
        return torch.cat([whole.chunk(degrees.world_size)[rank] for rank in degrees.groups("dp")[0]])

    return tree_map(of_data_ranks, gathered)
