"""Replacements for names of accelerate and transformers, which count every process as a data rank.

With ds_npu some processes share samples. Under DeepSpeed the Hugging Face Trainer reads its data through accelerate.
Read in accelerate 1.15 and transformers 5.23.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ds_npu.engine.announcement import with_section
from ds_npu.engine.clients.refusals import check_no_parallelism_config
from ds_npu.topology.degrees import Degrees

Function = Callable[..., Any]


def prepare_data_loader(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def prepared(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        degrees = sharing_degrees()
        if degrees is not None:
            position = {"num_processes": degrees.dp, "process_index": data_rank_of(degrees)}
            bound.arguments.update(position, torch_device_mesh=None)
        return original(*bound.args, **bound.kwargs)

    return prepared


def dispatcher_init(original: Function) -> Function:
    """For ``DataLoaderDispatcher.__init__``: each rank takes the slice of its data rank."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        degrees = sharing_degrees()
        if degrees is None:
            return
        # The loader asks for no more of accelerate's state: global rank 0 reads a batch for each data rank.
        self.state = SimpleNamespace(num_processes=degrees.dp, process_index=dist.get_rank(), device=self.state.device)
        cut = self.slice_fn
        data_rank = data_rank_of(degrees)

        def slice_of_data_rank(data: Any, chosen: slice, process_index: int, num_processes: int) -> Any:
            # A slice from 0 is rank 0's, or the one that every rank keeps to complete the last batch with.
            if chosen.start:
                length = chosen.stop - chosen.start
                chosen = slice(data_rank * length, (data_rank + 1) * length)
            return cut(data, chosen, process_index=process_index, num_processes=num_processes)

        self.slice_fn = slice_of_data_rank

    return init


def called_as_data_rank(original: Function) -> Function:
    """For a function that counts accelerate's processes, or gathers from all of them, and means data ranks."""

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        with data_ranks_as_processes():
            return original(*args, **kwargs)

    return called


def split_between_processes(original: Function) -> Function:
    """For a method that returns a context manager: it splits inputs over data ranks.

    Within its block processes are counted as ever.
    """

    @contextmanager
    def split(args: Any, kwargs: Any) -> Iterator[Any]:
        with ExitStack() as within:
            with data_ranks_as_processes():
                mine = within.enter_context(original(*args, **kwargs))
            yield mine

    @functools.wraps(original)
    def splitting(*args: Any, **kwargs: Any) -> Any:
        return split(args, kwargs)

    return splitting


def fill_in_for_data_ranks(original: Function) -> Function:
    """For transformers' method that fills in "auto" before there is an Accelerator: it counts data ranks."""

    @functools.wraps(original)
    def filled_in(self: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        # Asking for it makes the state, where there is none yet.
        state = args.distributed_state
        degrees = None if state is None else degrees_of(self.config, state)
        with nullcontext() if degrees is None else showing_data_ranks(degrees, [state]):
            return original(self, args, *rest, **kwargs)

    return filled_in


def validate_parallelism(original: Function) -> Function:
    @functools.wraps(original)
    def validated(self: Any, *args: Any, **kwargs: Any) -> Any:
        degrees = sharing_degrees()
        if degrees is not None:
            check_no_parallelism_config(self._sizes, degrees)
        return original(self, *args, **kwargs)

    return validated


def get_state_dict(original: Function) -> Function:
    @functools.wraps(original)
    def whole(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.distributed_type == "DEEPSPEED":
            from ds_npu.engine.checkpoints.weights import WholeWeights

            if isinstance(model, WholeWeights) and model.is_sharded:
                return model.whole_state_dict()
        return original(self, model, *args, **kwargs)

    return whole


def grid() -> Degrees | None:
    """The grid of this process's Accelerator, if its config has the section."""
    from accelerate.state import AcceleratorState, PartialState, is_initialized

    plugin = AcceleratorState().deepspeed_plugin if is_initialized() else None
    return None if plugin is None else _grid_of(plugin.deepspeed_config, PartialState())


def sharing_degrees() -> Degrees | None:
    """The grid of this process if some of its ranks share samples; else None."""
    return _sharing(grid())


def _grid_of(ds_config: Any, state: Any) -> Degrees | None:
    config = with_section(ds_config)
    # On the CPU accelerate may take each process for the only one, and then shares out nothing.
    if config is None or not dist.is_initialized() or state.backend is None:
        return None
    from ds_npu.engine.session import validate

    return validate(config)[1]


def degrees_of(ds_config: Any, state: Any) -> Degrees | None:
    """The grid that ``ds_config`` asks for, if some of its ranks share samples; ``state`` is accelerate's."""
    return _sharing(_grid_of(ds_config, state))


def _sharing(degrees: Degrees | None) -> Degrees | None:
    return degrees if degrees is not None and degrees.dp < degrees.world_size else None


def data_rank_of(degrees: Degrees) -> int:
    return degrees.coordinates(dist.get_rank())["dp"]


_JOINED: ContextVar[Degrees | None] = ContextVar("_JOINED", default=None)
"""The grid over whose data ranks accelerate's gather() joins tensors; None: it joins over all processes."""


@contextmanager
def data_ranks_as_processes() -> Iterator[None]:
    """Within the block, accelerate takes data ranks for its processes: in their number, its own index, and gathers."""
    degrees = None if _JOINED.get() else sharing_degrees()
    if degrees is None:
        yield
        return
    token = _JOINED.set(degrees)
    try:
        with showing_data_ranks(degrees, _states()):
            yield
    finally:
        _JOINED.reset(token)


def gather_of_data_ranks(original: Function) -> Function:
    """For accelerate's function that joins the tensors of all processes: with ``_JOINED``, once for each data rank."""

    @functools.wraps(original)
    def gathered(tensor: Any) -> Any:
        degrees = _JOINED.get()
        if degrees is None:
            return original(tensor)
        with _showing_processes(degrees):
            whole = original(tensor)
        return _once(whole, degrees)

    return gathered


def gather_objects_of_data_ranks(original: Function) -> Function:
    """For accelerate's function that joins the lists of all processes: with ``_JOINED``, once for each data rank."""

    @functools.wraps(original)
    def gathered(objects: Any) -> Any:
        degrees = _JOINED.get()
        if degrees is None:
            return original(objects)
        # Ranks whose samples another rank has as well add none.
        is_first = dist.get_rank() in degrees.groups("dp")[0]
        with _showing_processes(degrees):
            return original(objects if is_first else [])

    return gathered


def showing_data_ranks(degrees: Degrees, states: list[Any]) -> AbstractContextManager[None]:
    """Within the block, accelerate's ``states`` have the number of data ranks, and this process's data rank."""
    return _showing(states, degrees.dp, data_rank_of(degrees))


def _showing_processes(degrees: Degrees) -> AbstractContextManager[None]:
    return _showing(_states(), degrees.world_size, dist.get_rank())


def _states() -> list[Any]:
    from accelerate.state import AcceleratorState, PartialState

    # AcceleratorState copies from PartialState whenever it is made.
    return [PartialState(), AcceleratorState()]


@contextmanager
def _showing(states: list[Any], count: int, index: int) -> Iterator[None]:
    before = [(each.num_processes, each.process_index) for each in states]
    for each in states:
        each.num_processes = count
        each.process_index = index
    try:
        yield
    finally:
        for each, (number, index) in zip(states, before, strict=True):
            each.num_processes = number
            each.process_index = index


def _once(gathered: Any, degrees: Degrees) -> Any:
    """Keep, of tensors that were ``gathered`` from all processes, those of one process for each data rank."""
    from accelerate.utils.operations import recursively_apply

    def of_data_ranks(whole: torch.Tensor) -> torch.Tensor:
        return torch.cat([whole.chunk(degrees.world_size)[rank] for rank in degrees.groups("dp")[0]])

    return recursively_apply(of_data_ranks, gathered)
