"""The treatment of saved tensors at one point of a forward, for a computation that starts further inside.

A computation that runs inside of another module's forward, and is no part of it, must not be recorded by the
recomputation of that module: neither by its hooks on saved tensors nor by its dispatch modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

Hook = Callable[[Any], Any]


def _unchanged(value: Any) -> Any:
    return value


class SavingContext:
    """The hooks on saved tensors and the number of dispatch modes at the point where this object is made."""

    def __init__(self) -> None:
        hooks: tuple[Hook, Hook] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._hooks = hooks or (_unchanged, _unchanged)
        self._modes = len(_get_current_dispatch_mode_stack())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context, inside of the point where this object was made, with the hooks and modes of that point."""
        inner = []
        while len(_get_current_dispatch_mode_stack()) > self._modes:
            inner.append(_pop_mode())
        try:
            with saved_tensors_hooks(*self._hooks):
                yield
        finally:
            for mode in reversed(inner):
                _push_mode(mode)
