"""The checked section of a DeepSpeed config and the topology of this world, from which an engine is built."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ds_npu.capability import hccl_options
from ds_npu.config.check import Checked, check
from ds_npu.config.sections import DsNpuConfig
from ds_npu.engine.failures.failed_ranks import explain_failed_ranks
from ds_npu.features.driver import unmet
from ds_npu.log import warn_once
from ds_npu.planner.communicators import buffer_mib
from ds_npu.topology.degrees import Axis, Degrees
from ds_npu.topology.topology import Topology

MOST_DIGITS = 20
"""Most digits of a world size: Python reads no integer of thousands of digits."""


@dataclass(frozen=True)
class Session:
    """The section and the topology that one engine is built from."""

    config: DsNpuConfig
    topology: Topology


_topologies: dict[tuple[Any, Degrees], Topology] = {}
"""DeepSpeed makes its config several times for one engine (zero.Init, initialize); they share one set of groups."""


def world_size() -> int | None:
    """The world size of the process group, or else of the launcher; None where only MPI will tell."""
    if dist.is_initialized():
        return dist.get_world_size()
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isascii() and size.isdecimal() and len(size) < MOST_DIGITS else None


_checked: dict[tuple[str, int | None, int | None], Checked] = {}
"""DeepSpeed reads one config several times, too; it is checked once for a world and a model."""


def validate(config: dict[str, Any], stages: int | None = None) -> tuple[DsNpuConfig, Degrees]:
    """Check ``config`` for this world and a PipelineModule of ``stages``; raises ConfigError with every reason."""
    explain_failed_ranks()
    key = (repr(config), world_size(), stages)
    if key not in _checked:
        _checked[key] = check(config, world_size(), stages, unmet)
        for warning in _checked[key].warnings:
            warn_once(warning)
    checked = _checked[key]
    return checked.config, checked.degrees


def open_session(config: dict[str, Any], stages: int | None = None) -> Session:
    """Check ``config`` and make, or find, this world's process groups. Every rank calls it at the same time."""
    section, degrees = validate(config, stages)
    key = (dist.group.WORLD, degrees)
    if key not in _topologies:
        for old in [old for old in _topologies if old[0] is not dist.group.WORLD]:
            del _topologies[old]
        _topologies[key] = Topology(degrees, lambda axes: hccl_buffers(degrees, axes, config))
    return Session(section, _topologies[key])


def hccl_buffers(degrees: Degrees, axes: tuple[Axis, ...], config: dict[str, Any]) -> Any:
    """Options for the communicator over ``axes``: a buffer for its largest message."""
    if dist.get_backend() != "hccl":
        return None
    return hccl_options(buffer_mib(degrees, axes, config))
