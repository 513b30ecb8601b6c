"""Random numbers that differ over the tensor (or context) ranks inside of a region and agree outside of it.

Nothing is remembered between regions: a region's seed is drawn from the default CPU generator, which agrees over
those ranks and which activation checkpointing saves and restores. So a recomputed region draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


def _generators(device_type: str) -> list[Any]:
    """What holds the states of the default generators: of the CPU, and of the current device of ``device_type``."""
    return [torch.random] if device_type == "cpu" else [torch.random, torch.get_device_module(device_type)]


def _seed(device_type: str, seed: int) -> None:
    # Not torch.manual_seed: that seeds every device.
    torch.default_generator.manual_seed(seed)
    if device_type != "cpu":
        torch.get_device_module(device_type).manual_seed(seed)


class RegionRandomness:
    """Gives each rank along ``axis`` random numbers of its own between ``enter`` and ``leave``.

    ``enter`` draws one number from the default CPU generator; in the region the CPU's and the device's default
    generators are seeded with it and that rank; ``leave`` puts them back to where they were after the draw.
    Regions may lie within each other. The host waits for nothing: the states are on the host. With one rank
    nothing is drawn and nothing changes.
    """

    def __init__(self, topology: Topology, device_type: str, axis: Axis = "tp") -> None:
        self.rank = topology.rank(axis)
        self.splits = topology.size(axis) > 1
        self.device_type = device_type
        self._outside: list[States] = []

    def enter(self) -> None:
        if self.splits:
            draw = int(torch.randint(SEEDS - 1, (), device="cpu"))
            self._outside.append([generator.get_rng_state() for generator in _generators(self.device_type)])
            _seed(self.device_type, (draw + self.rank * STEP) % SEEDS)

    def leave(self) -> None:
        """Nothing outside of regions."""
        if self._outside:
            for generator, state in zip(_generators(self.device_type), self._outside.pop(), strict=True):
                generator.set_rng_state(state)

    @contextmanager
    def region(self) -> Iterator[None]:
        """A region, which may be left early: in a block whose end is outside of it."""
        around = len(self._outside)
        self.enter()
        try:
            yield
        finally:
            while len(self._outside) > around:
                self.leave()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """In a region: the numbers from outside of it, for what every tensor rank computes alike."""
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
        """Make a region of what runs between the start of ``first`` and the end of ``last``; the handles undo it.

        It ends also where ``last`` raises. Where something between the two may, ``region`` goes around both.
        """
        return [
            first.register_forward_pre_hook(lambda *_: self.enter()),
            last.register_forward_hook(lambda *_: self.leave(), always_call=True),
        ]


def align_generators(topology: Topology, device_type: str, axis: Axis = "tp") -> None:
    """Give every rank along ``axis`` the default generators' states of its rank 0, the CPU's and the device's."""
    if topology.size(axis) > 1:
        states: list[Any] = [generator.get_rng_state() for generator in _generators(device_type)]
        dist.broadcast_object_list(states, src=topology.ranks(axis)[0], group=topology.group(axis))
        for generator, state in zip(_generators(device_type), states, strict=True):
            generator.set_rng_state(state)


def drops(module: nn.Module) -> bool:
    """Whether ``module`` itself draws random numbers: a dropout, or an attention that drops its weights."""
    rates: list[Any] = [vars(module).get("attention_dropout"), module.p if isinstance(module, nn.Dropout) else 0]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
