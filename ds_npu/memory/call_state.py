"""What a call depends on beside its arguments: the states of the random generators, and autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch


class _Generator(Protocol):
    """A module of torch with the state of a default generator."""

    def get_rng_state(self) -> torch.Tensor: ...

    def set_rng_state(self, new_state: torch.Tensor) -> None: ...


class CallState:
    """That of the CPU and of the current device of ``device_type``, now; the device is not waited for."""

    def __init__(self, device_type: str) -> None:
        kinds = dict.fromkeys(("cpu", device_type))
        self._generators: list[_Generator] = [
            torch.random if kind == "cpu" else torch.get_device_module(kind) for kind in kinds
        ]
        self._random = self._now()
        self._autocast = [
            torch.autocast(
                kind,
                torch.get_autocast_dtype(kind),
                torch.is_autocast_enabled(kind),
                cache_enabled=torch.is_autocast_cache_enabled(),
            )
            for kind in kinds
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context that has this state; the one before is back at its end."""
        before = self._now()
        self._set(self._random)
        try:
            with ExitStack() as stack:
                for autocast in self._autocast:
                    stack.enter_context(autocast)
                yield
        finally:
            self._set(before)

    def _now(self) -> list[torch.Tensor]:
        return [each.get_rng_state() for each in self._generators]

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_rng_state(state)
