"""Activations that are computed again in backward instead of kept.

A Recomputation is one call of a part of a model. The tensors that the part saves for backward are not kept; they are
computed again, all at once, when backward asks for the first of them. Where the part is cheap (a norm, an activation
function), its output need not be kept either: other operators that save it within ``without_outputs`` keep a reference
to the Recomputation instead. No storage is released under a tensor that somebody may read: the output is freed when
nobody holds it.

Both are hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks); the innermost apply. The values are those of
forward to the bit: arguments, random numbers and autocast are the same. Source: Chen et al. 2016 (arXiv:1604.06174); of
outputs, MindSpeed's ``CheckpointWithoutOutput``, which releases storages instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from ds_npu.memory.call_state import CallState
from ds_npu.memory.held_tensor import HeldTensor, keep
from ds_npu.memory.kept_results import KeptResults, Recording, Replaying
from ds_npu.memory.swapped_activations import SWAPPED_FORWARD
from ds_npu.parallel.runtime.micro_batch import running
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute


class RecomputationError(RuntimeError):
    """A part of a model cannot be computed again as it was."""


class _EnoughError(Exception):
    """Ends a recomputation: all that backward needs has been computed."""


class _Handle:
    """A substitute for a saved tensor; autograd drops it, with the value computed again, after its use."""

    def __init__(self, of: Recomputation, like: torch.Tensor) -> None:
        self.of, self.like = of, (like.shape, like.dtype)
        self.value: torch.Tensor | None = None


@dataclass(frozen=True)
class _Output:
    """An output that can be computed again."""

    of: Recomputation
    version: int
    """The output's version when it was made."""
    dtype: torch.dtype
    offset: int
    """The output's offset in its storage."""


@dataclass(frozen=True)
class _PartOfOutput(HeldTensor):
    """A substitute for a saved tensor that is an output, or a view of one."""

    output: _Output
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool

    def get(self) -> torch.Tensor:
        whole = self.output.of.take_output()
        offset = self.offset - self.output.offset + whole.storage_offset()
        return whole.as_strided(self.size, self.stride, offset).requires_grad_(self.requires_grad)


OUTPUT: TensorAttribute[_Output] = TensorAttribute("ds_npu_output")
"""Marks a storage that holds an output which can be computed again."""


def hold_tensor(tensor: torch.Tensor) -> HeldTensor:
    """Return a substitute for ``tensor``: the Recomputation that makes it, its copy on the host, or itself."""
    with torch._C.DisableTorchFunctionSubclass():
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        output = OUTPUT.get(tensor.untyped_storage()) if plain else None
        if output is not None and tensor._version == output.version and tensor.dtype == output.dtype:
            output.of.holders += 1
            offset = int(tensor.storage_offset())
            return _PartOfOutput(output, tensor.shape, tensor.stride(), offset, tensor.requires_grad)
        swapped = SWAPPED_FORWARD.of(running())
        return keep(tensor) if swapped is None else swapped.hold(tensor)


def without_outputs() -> AbstractContextManager[object]:
    """A context that keeps the tensors saved for backward, except the outputs of Recomputations."""
    return saved_tensors_hooks(hold_tensor, lambda held: held.get())


class Recomputation:
    """One call of ``function``, whose result depends on its arguments and ``CallState`` only."""

    def __init__(
        self, function: Callable[..., Any], device_type: str, stops_early: bool = True, kept: Iterable[str] = ()
    ) -> None:
        """``stops_early``: computing again ends with the last saved tensor, not with the function.

        ``kept``: keys of ``kept_results.OPERATORS``, whose results are kept; only where it stops early.
        """
        self._function, self._stops_early = function, stops_early
        self._results = KeptResults(kept, device_type) if kept else None
        self._state = CallState(device_type)
        self._handles: list[weakref.ref[_Handle]] = []
        self._arguments: Any = None
        self._output: torch.Tensor | None = None
        self.holders = 0
        """The number of saved tensors that are the output, or a view of it."""
        self._taken = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and keep only ``args`` and ``kwargs``."""
        self.hold(*args, **kwargs)
        with self.saving():
            return self._function(*args, **kwargs)

    def hold(self, *args: Any, **kwargs: Any) -> None:
        """Keep the arguments of the call, except those that can be computed again themselves."""
        self._arguments = tree_map(
            lambda each: hold_tensor(each) if isinstance(each, torch.Tensor) else each, (args, kwargs)
        )

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context that keeps none of the tensors saved for backward, except the results chosen to be kept."""
        with saved_tensors_hooks(self._pack, self._unpack):
            if self._results is None:
                yield
                return
            with Recording(self._results, hold_tensor):
                yield
            self._results.close()

    def forget(self, output: torch.Tensor) -> None:
        """Make ``without_outputs`` keep nothing of ``output``, the function's result."""
        storage = output.untyped_storage()
        if storage.nbytes() == output.nbytes:
            OUTPUT.set(storage, _Output(self, output._version, output.dtype, int(output.storage_offset())))

    def take_output(self) -> torch.Tensor:
        """Return the function's result, computed again; it is dropped when each saved tensor has taken it."""
        if self._output is None:
            self._compute()
        output = self._output
        if output is None:
            raise RecomputationError(f"{self._function} returned no tensor when it was computed again")
        self._taken += 1
        if self._taken % self.holders == 0:
            self._output = None
        return output

    def _pack(self, tensor: torch.Tensor) -> _Handle:
        handle = _Handle(self, tensor)
        self._handles.append(weakref.ref(handle))
        if self._results is not None:
            self._results.need()
        return handle

    def _unpack(self, handle: _Handle) -> torch.Tensor:
        if handle.value is None:
            self._compute()
        if handle.value is None:
            raise RecomputationError(f"{self._function} saved fewer tensors when it was computed again")
        return handle.value

    def _compute(self) -> None:
        """Call the function again, for the values of all handles and the output."""
        index = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal index
            if index == len(self._handles):
                raise RecomputationError(f"{self._function} saved more tensors when it was computed again")
            handle = self._handles[index]()
            value = tensor.detach()
            if handle is not None:
                if handle.like != (value.shape, value.dtype):
                    found = f"{list(value.shape)} of {value.dtype}, in place of {list(handle.like[0])}"
                    raise RecomputationError(f"{self._function} saved {found} of {handle.like[1]} when computed again")
                handle.value = value
            index += 1
            if self._stops_early and index == len(self._handles):
                raise _EnoughError
            return value

        args, kwargs = tree_map(lambda each: each.get() if isinstance(each, HeldTensor) else each, self._arguments)
        with ExitStack() as stack:
            stack.enter_context(self._state.restored())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(pack, lambda value: value))
            if self._results is not None:
                stack.enter_context(Replaying(self._results))
            try:
                found = self._function(*args, **kwargs)
            except _EnoughError:
                return
        self._output = found.detach() if isinstance(found, torch.Tensor) else None
