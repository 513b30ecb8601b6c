"""Random numbers that differ over the tensor (or context) ranks inside of a region and agree outside of it.

No state is kept between regions: the seed of a region is drawn from the default CPU generator, which agrees over those
ranks and which activation checkpointing saves and restores. So a recomputed region draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

from ds_npu.parallel.runtime.micro_batch import Fact, running, within
from ds_npu.topology.degrees import Axis
from ds_npu.topology.topology import Topology

SEEDS = 1 << 63
STEP = 0x9E3779B97F4A7C15
"""Seeds of neighbouring ranks lie far apart (2**64 over the golden ratio), so regions do not share them by chance."""

States = list[torch.Tensor]


def _generators(device_type: str) -> list[ModuleType]:
    """Torch's modules of the default generators of the CPU and of the current device of ``device_type``."""
    return [torch.random] if device_type == "cpu" else [torch.random, torch.get_device_module(device_type)]


def generator_states(device_type: str) -> States:
    """The states of the default generators of CPU and device, on the host, without waiting for the device."""
    return [generator.get_rng_state() for generator in _generators(device_type)]


def restore_generators(device_type: str, states: States) -> None:
    """Set the states that ``generator_states`` returned."""
    for generator, state in zip(_generators(device_type), states, strict=True):
        generator.set_rng_state(state)


def _seed(device_type: str, seed: int) -> None:
    # torch.manual_seed would seed every device.
    torch.default_generator.manual_seed(seed)
    if device_type != "cpu":
        torch.get_device_module(device_type).manual_seed(seed)


class RegionRandomness:
    """Gives each rank along ``axis`` random numbers of its own in ``region``.

    ``region`` draws one number from the default CPU generator and seeds the CPU's and the device's default generators
    with it and the rank; at its end (or at ``leave``) it restores their states from after the draw. Regions may be
    nested. Nothing waits for the device: the states are on the host, and the MicroBatch that runs knows them. With one
    rank nothing is drawn and nothing changes.
    """

    def __init__(self, topology: Topology, device_type: str, axis: Axis = "tp") -> None:
        self.rank = topology.rank(axis)
        self.is_sharded = topology.size(axis) > 1
        self.device_type = device_type
        self._outside: Fact[tuple[States, ...]] = Fact()
        """The states around each of the regions, outermost first."""

    @contextmanager
    def region(self) -> Iterator[None]:
        """A context in which this rank draws numbers of its own."""
        if not self.is_sharded:
            yield
            return
        with within(running()) as micro_batch:
            around = self._outside.of(micro_batch) or ()
            draw = int(torch.randint(SEEDS - 1, (), device="cpu"))
            self._outside.set(micro_batch, (*around, generator_states(self.device_type)))
            _seed(self.device_type, (draw + self.rank * STEP) % SEEDS)
            try:
                yield
            finally:
                while len(self._outside.of(micro_batch) or ()) > len(around):
                    self.leave()

    def leave(self) -> None:
        """Leave the innermost region before its end; does nothing outside of a region."""
        micro_batch = running()
        outside = self._outside.of(micro_batch)
        if micro_batch is not None and outside:
            restore_generators(self.device_type, outside[-1])
            self._outside.set(micro_batch, outside[:-1])

    @contextmanager
    def outside(self) -> Iterator[None]:
        """In a region, a context that draws the numbers from outside: for computations that ranks replicate."""
        micro_batch = running()
        states = self._outside.of(micro_batch)
        if micro_batch is None or not states:
            yield
            return
        inside = generator_states(self.device_type)
        restore_generators(self.device_type, states[0])
        try:
            yield
        finally:
            self._outside.set(micro_batch, (generator_states(self.device_type), *states[1:]))
            restore_generators(self.device_type, inside)


def align_generators(topology: Topology, device_type: str, axis: Axis = "tp") -> None:
    """Broadcast the states of the default generators (CPU and device) from rank 0 along ``axis``."""
    if topology.size(axis) > 1:
        states = generator_states(device_type)
        dist.broadcast_object_list(states, src=topology.ranks(axis)[0], group=topology.group(axis))
        restore_generators(device_type, states)


def drops(module: nn.Module) -> bool:
    """Whether ``module`` itself draws random numbers: a dropout, or an attention that drops its weights."""
    rate = module.p if isinstance(module, nn.Dropout) else vars(module).get("attention_dropout")
    return isinstance(rate, float) and rate > 0
