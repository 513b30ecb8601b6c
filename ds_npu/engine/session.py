"""The checked section of a DeepSpeed config, the topology of this world and the device of this process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from ds_npu.capability import hccl_options
from ds_npu.config.check import Checked, check
from ds_npu.config.problems import Config
from ds_npu.config.sections import DsNpuConfig
from ds_npu.engine.failures.failed_ranks import explain_failed_ranks
from ds_npu.engine.mpu import CUT_INTO_STAGES, mpu_of
from ds_npu.features.driver import unmet
from ds_npu.log import warn_once
from ds_npu.planner.communicators import CommunicatorPlan
from ds_npu.topology.degrees import Degrees
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


def validate(config: Config, stages: int | None = None) -> tuple[DsNpuConfig, Degrees]:
    """Check ``config`` for this world and a PipelineModule of ``stages``; raises ConfigError with every reason."""
    explain_failed_ranks()
    key = (repr(config), world_size(), stages)
    if key not in _checked:
        _checked[key] = check(config, world_size(), stages, unmet)
        for warning in _checked[key].warnings:
            warn_once(warning)
    checked = _checked[key]
    return checked.config, checked.degrees


def open_session(config: Config, stages: int | None = None) -> Session:
    """Check ``config`` and make, or find, this world's process groups. Every rank calls it at the same time."""
    section, degrees = validate(config, stages)
    key = (dist.group.WORLD, degrees)
    if key not in _topologies:
        for old in [old for old in _topologies if old[0] is not dist.group.WORLD]:
            del _topologies[old]

        plan = CommunicatorPlan(degrees, config, section.hccl)

        def options(ranks: tuple[int, ...], name: str) -> Any:
            """HCCL's options for a group: those of the config, and a buffer for the largest message by the config."""
            return hccl_options(plan.options(ranks, name)) if dist.get_backend() == "hccl" else None

        _topologies[key] = Topology(degrees, options)
    return Session(section, _topologies[key])


def use_own_device(arguments: Any = None) -> None:
    """Make the device current that DeepSpeed's engine will use, with ``arguments`` as its ``args``.

    DeepSpeed does so in its constructor, after features have been applied. Until then torch_npu takes NPU 0 for every
    process: random states are read from it, and communicators are opened from it, on every rank of the machine.
    Called where the process group exists: DeepSpeed has then set LOCAL_RANK under MPI too. Raises RuntimeError where
    LOCAL_RANK is not set, or numbers an NPU that this process does not see.
    """
    index, source = _own_index(arguments)
    accelerator = get_accelerator()
    if accelerator.device_name() == "npu":
        # Imported here, since it imports torch_npu.
        from ds_npu.accelerator.npu_accelerator import check_own_device

        check_own_device(index, source)
    if index >= 0:
        accelerator.set_device(index)


def _own_index(arguments: Any) -> tuple[int, str]:
    """The number of the device, and what says so (deepspeed/runtime/engine.py, _set_distributed_vars)."""
    device_rank = getattr(arguments, "device_rank", None)
    if device_rank is not None:
        return int(device_rank), f"args.device_rank={device_rank}"
    for variable in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if variable in os.environ:
            return int(os.environ[variable]), f"{variable}={os.environ[variable]}"
    raise RuntimeError(
        "LOCAL_RANK is not set, so this process does not know which device of its machine is its own. Start it with "
        "deepspeed, torchrun or accelerate launch, or set LOCAL_RANK (0 in a single process) before DeepSpeed is used."
    )


class ContextGrid(PipelineParallelGrid):  # type: ignore[misc]
    """A PipelineModule's grid with a context axis, for the announced config.

    DeepSpeed's grid has the axes pipe, data and model, and PipelineModule ties weights and writes layers over ``data``.
    Here ``data`` is dp x cp, so that all of that remains right, and what DeepSpeed asks of an mpu is answered with dp
    and cp apart. Raises ConfigError where its axes and the section disagree.
    """

    def __init__(self, config: Config, topology: Any, process_group: Any) -> None:
        use_own_device()
        super().__init__(topology=topology, process_group=process_group)
        opened = open_session(config, stages=self.pipe_parallel_size)
        self.__dict__.update(vars(mpu_of(opened.topology, CUT_INTO_STAGES)))
