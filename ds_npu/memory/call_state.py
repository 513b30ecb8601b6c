"""Hidden inputs of a call: the states of the random generators, and autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ds_npu.parallel.tensor.randomness import generator_states, restore_generators


class CallState:
    """The present random and autocast states of the CPU and of the current device.

    The host does not wait for the device.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._random = generator_states(device_type)
        self._autocast = [
            torch.autocast(
                kind,
                torch.get_autocast_dtype(kind),
                torch.is_autocast_enabled(kind),
                cache_enabled=torch.is_autocast_cache_enabled(),
            )
            for kind in dict.fromkeys(("cpu", device_type))
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Enter this state; at the end of the context the previous one returns."""
        before = generator_states(self._device_type)
        restore_generators(self._device_type, self._random)
        try:
            with ExitStack() as stack:
                for autocast in self._autocast:
                    stack.enter_context(autocast)
                yield
        finally:
            restore_generators(self._device_type, before)
