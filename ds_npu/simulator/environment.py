"""The environment variables with which a process runs on simulated NPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_npu.topology.machine import A2, COLLECTIVES, TABLES, Machine, machine_of

SOCS = (
    "910B1", "910B2", "910B2C", "910B3", "910B4", "910B4-1",
    "910_9391", "910_9392", "910_9381", "910_9382", "910_9372", "910_9362",
)  # fmt: skip
"""Names of chips as torch_npu has them, without "Ascend": 910B* are the 910B, 910_93* the A3."""

MOST_DEVICES = 1024
MOST_MEMORY = 2**40
MOST_IN_ALL = 4 * 2**40
"""Bytes of all devices: a rank maps 16 times the memory of all ranks, and has 128 TiB of addresses."""

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class Simulation:
    """The options of ``ds_npu sim``; ``memory_bytes`` is that of one device, ``chaos`` a seed, ``trace`` a folder.

    ``machine``: whose speeds to take (the chip's). ``present``: the NPUs that have a process, all if it is empty.
    ``races``: the trace also has touched bytes and Python stacks, and the host puts tasks on streams itself.
    ``dry``: floating-point numbers are not computed. ``routing``: how choices of experts are drawn, by ``routing_of``.
    """

    devices: int = 8
    soc: str = "910B2"
    memory_bytes: int = A2.hbm
    chaos: int | None = None
    faults: tuple[str, ...] = ()
    trace: str = ""
    dry: bool = False
    routing: str = ""
    machine: Machine | None = None
    present: tuple[int, ...] = ()
    races: bool = False

    def excess(self) -> str | None:
        """Why the devices' memory does not fit into a process's addresses; None if it does."""
        if self.devices * self.memory_bytes <= MOST_IN_ALL:
            return None
        return (
            f"found --devices {self.devices} with {self.memory_bytes / 2**30:g} GiB each; {MOST_IN_ALL // 2**30} GiB "
            f"together are accepted: take fewer --devices or less --memory"
        )

    def __str__(self) -> str:
        chaos = "" if self.chaos is None else f", chaos {self.chaos}"
        faults = f", faults {' '.join(self.faults)}" if self.faults else ""
        memory = f"{self.memory_bytes / 2**30:g} GiB"
        trace = f", traced to {self.trace}" if self.trace else ""
        dry = ", dry: numbers are not computed" if self.dry else ""
        return f"{self.devices} simulated NPUs (Ascend{self.soc}, {memory} each{chaos}{faults}{trace}{dry})"

    def environment(self, home: Path, inherited: Mapping[str, str]) -> dict[str, str]:
        """``inherited`` and the variables for the simulated NPUs whose libraries are in ``home``."""
        return {
            **inherited,
            "PATH": ":".join((str(home / "tools/profiler/bin"), inherited.get("PATH", os.defpath))),
            "LD_LIBRARY_PATH": ":".join(filter(None, (str(home), inherited.get("LD_LIBRARY_PATH")))),
            "ASCEND_HOME_PATH": str(home),
            "ASCEND_OPP_PATH": str(home / "opp"),
            "DS_NPU_SIM_DEVICES": str(self.devices),
            "DS_NPU_SIM_SOC": f"Ascend{self.soc}",
            "DS_NPU_SIM_MEMORY": str(self.memory_bytes),
            "DS_NPU_SIM_CHAOS": "" if self.chaos is None else str(self.chaos),
            "DS_NPU_SIM_FAULT": ",".join(self.faults),
            "DS_NPU_SIM_MACHINE": _numbers(self.machine or machine_of(f"Ascend{self.soc}")),
            "DS_NPU_SIM_PRESENT": ",".join(map(str, self.present)),
            "DS_NPU_SIM_TRACE": self.trace,
            "DS_NPU_SIM_ROUTING": self.routing,
            "DS_NPU_SIM_DRY": "1" if self.dry else "",
            "DS_NPU_SIM_RACES": "1" if self.races else "",
            **({"TASK_QUEUE_ENABLE": "0"} if self.races else {}),
        }


def _numbers(machine: Machine) -> str:
    """The numbers of ``machine`` as ``csrc/machine.h`` reads them."""
    numbers = {name: value for name, value in vars(machine).items() if name != "name"}
    tables = {name: ",".join(f"{size}:{rate!r}" for size, rate in numbers[name]) for name in TABLES}
    phases = {kind: ",".join(map(":".join, each)) for kind, each in COLLECTIVES.items()}
    return " ".join(f"{name}={value}" for name, value in (numbers | tables | phases).items())


def bytes_of(text: str) -> int:
    """``"64GiB"`` in bytes. Raises ValueError for anything that is not such a size, up to 1TiB."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]iB)?", text)
    size = float(found[1]) * _UNITS[found[2] or ""] if found else 0.0
    if not 1 <= size <= MOST_MEMORY:
        raise ValueError(f"found {text!r}; a size such as 64GiB or 512MiB, up to 1TiB")
    return int(size)


def routing_of(text: str) -> str:
    """``"uniform"`` or ``"zipf:1.2"``, with a seed as in ``"uniform@7"``, as ``csrc/routing.cpp`` reads it.

    Raises ValueError for anything else.
    """
    found = re.fullmatch(r"(?:uniform|zipf:([0-9]{1,3}(?:\.[0-9]{1,6})?))(?:@([0-9]{1,9}))?", text)
    if not found:
        raise ValueError(f"found {text!r}; uniform, or zipf:EXPONENT such as zipf:1.2, and @SEED behind it")
    return f"{found[1] or 0} {found[2] or 0}"


def integer_of(least: int, most: int, text: str) -> int:
    """The integer that ``text`` is. Raises ValueError for anything but one from ``least`` to ``most``."""
    if not re.fullmatch(r"[0-9]{1,20}", text) or not least <= int(text) <= most:
        raise ValueError(f"found {text!r}; an integer from {least} to {most}")
    return int(text)
