"""Random numbers that differ over the tensor (or context) ranks inside of a region and agree outside of it.

No state is kept between regions: the seed of a region is drawn from the default CPU generator, which agrees over those
ranks and which activation checkpointing saves and restores. So a recomputed region draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_npu.topology.degrees import Axis
from ds_npu.topology.topology import Topology

SEEDS = 1 << 63
STEP = 0x9E3779B97F4A7C15
"""Seeds of neighbouring ranks lie far apart (2**64 over the golden ratio), so regions do not share them by chance."""

States = list[torch.Tensor]


class _DefaultGenerator(Protocol):
    """A module of torch with the state of a default generator."""

    def get_rng_state(self) -> torch.Tensor: ...

    def set_rng_state(self, new_state: torch.Tensor) -> None: ...


def _generators(device_type: str) -> list[_DefaultGenerator]:
    """The default generators of the CPU and of the current device of ``device_type``."""
    return [torch.random] if device_type == "cpu" else [torch.random, torch.get_device_module(device_type)]


def _seed(device_type: str, seed: int) -> None:
    # Not torch.manual_seed: that seeds every device.
    torch.default_generator.manual_seed(seed)
    if device_type != "cpu":
        torch.get_device_module(device_type).manual_seed(seed)


class RegionRandomness:
    """Gives each rank along ``axis`` random numbers of its own between ``enter`` and ``leave``.

    ``enter`` draws one number from the default CPU generator and seeds the CPU's and the device's default generators
    with it and the rank; ``leave`` restores their states from after the draw. Regions may be nested. Nothing waits for
    the device: the states are on the host. With one rank nothing is drawn and nothing changes.
    """

    def __init__(self, topology: Topology, device_type: str, axis: Axis = "tp") -> None:
        self.rank = topology.rank(axis)
        self.is_sharded = topology.size(axis) > 1
        self.device_type = device_type
        self._outside: list[States] = []

    def enter(self) -> None:
        if self.is_sharded:
            draw = int(torch.randint(SEEDS - 1, (), device="cpu"))
            self._outside.append([generator.get_rng_state() for generator in _generators(self.device_type)])
            _seed(self.device_type, (draw + self.rank * STEP) % SEEDS)

    def leave(self) -> None:
        """Restore the generators; does nothing outside of a region."""
        if self._outside:
            for generator, state in zip(_generators(self.device_type), self._outside.pop(), strict=True):
                generator.set_rng_state(state)

    @contextmanager
    def region(self) -> Iterator[None]:
        """A region as a context; one that ``attach`` began in it and an exception kept open ends with it."""
        depth = len(self._outside)
        self.enter()
        try:
            yield
        finally:
            while len(self._outside) > depth:
                self.leave()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside of a region, draw the numbers from outside of it: for what every tensor rank computes alike."""
        if not self._outside:
            yield
            return
        generators = _generators(self.device_type)
        inside = [generator.get_rng_state() for generator in generators]
        for generator, state in zip(generators, self._outside[0], strict=True):
            generator.set_rng_state(state)
        try:
            yield
        finally:
            self._outside[0] = [generator.get_rng_state() for generator in generators]
            for generator, state in zip(generators, inside, strict=True):
                generator.set_rng_state(state)

    def attach(self, first: nn.Module, last: nn.Module) -> list[RemovableHandle]:
        """Make a region from the start of ``first`` to the end of ``last``; the handles undo it.

        It ends also where ``last`` raises. Where a module between the two may raise, put ``region`` around both.
        """
        return [
            first.register_forward_pre_hook(lambda *_: self.enter()),
            last.register_forward_hook(lambda *_: self.leave(), always_call=True),
        ]


def align_generators(topology: Topology, device_type: str, axis: Axis = "tp") -> None:
    """Broadcast the states of the default generators (CPU and device) from rank 0 along ``axis``."""
    if topology.size(axis) > 1:
        states = [generator.get_rng_state() for generator in _generators(device_type)]
        dist.broadcast_object_list(states, src=topology.ranks(axis)[0], group=topology.group(axis))
        for generator, state in zip(_generators(device_type), states, strict=True):
            generator.set_rng_state(state)


def drops(module: nn.Module) -> bool:
    """Whether ``module`` itself draws random numbers: a dropout, or an attention that drops its weights."""
    rate = module.p if isinstance(module, nn.Dropout) else vars(module).get("attention_dropout")
    return isinstance(rate, float) and rate > 0
