"""What a process's environment must say so that torch_npu finds simulated NPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOCS = (
    "910B1", "910B2", "910B2C", "910B3", "910B4", "910B4-1",
    "910_9391", "910_9392", "910_9381", "910_9382", "910_9372", "910_9362",
)  # fmt: skip
"""As torch_npu knows them, without their "Ascend": 910B* are the 910B, 910_93* the A3."""

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_FAULT = re.compile(r"(acl|Hccl)\w+(:[1-9]\d*)?(@\d+)?=(\d+|exit)")


@dataclass(frozen=True)
class Simulation:
    """What ``ds_npu sim`` simulates; ``memory_bytes`` is one device's, ``chaos`` a seed, ``trace`` a folder."""

    devices: int = 8
    soc: str = "910B2"
    memory_bytes: int = 64 * 2**30
    chaos: int | None = None
    faults: tuple[str, ...] = ()
    trace: str = ""

    def __str__(self) -> str:
        chaos = "" if self.chaos is None else f", chaos {self.chaos}"
        faults = f", faults {' '.join(self.faults)}" if self.faults else ""
        memory = f"{self.memory_bytes / 2**30:g} GiB"
        trace = f", traced to {self.trace}" if self.trace else ""
        return f"{self.devices} simulated NPUs (Ascend{self.soc}, {memory} each{chaos}{faults}{trace})"

    def environment(self, home: Path, inherited: Mapping[str, str]) -> dict[str, str]:
        """``inherited`` with what a process needs to see the simulated NPUs whose libraries are in ``home``."""
        paths = [str(home), *filter(None, [inherited.get("LD_LIBRARY_PATH")])]
        chosen = {
            "LD_LIBRARY_PATH": ":".join(paths),
            "ASCEND_HOME_PATH": str(home),
            "ASCEND_OPP_PATH": str(home / "opp"),
            "DS_NPU_SIM_DEVICES": str(self.devices),
            "DS_NPU_SIM_SOC": f"Ascend{self.soc}",
            "DS_NPU_SIM_MEMORY": str(self.memory_bytes),
            "DS_NPU_SIM_CHAOS": "" if self.chaos is None else str(self.chaos),
            "DS_NPU_SIM_FAULT": ",".join(self.faults),
            "DS_NPU_SIM_TRACE": self.trace,
        }
        return {**inherited, **chosen}


def bytes_of(text: str) -> int:
    """``"64GiB"`` in bytes. Raises ValueError for anything that is not a positive number with KiB, MiB, GiB or TiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB)?", text)
    size = int(float(found[1]) * _UNITS[found[2] or ""]) if found else 0
    if size <= 0:
        raise ValueError(f"found {text!r}; a size such as 64GiB or 512MiB")
    return size


def fault_of(text: str) -> str:
    """``text`` if it is a fault as the simulator reads it, such as ``HcclAllReduce:3@1=exit``. Raises ValueError."""
    if not _FAULT.fullmatch(text):
        raise ValueError(
            f"found {text!r}; NAME[:CALL][@RANK]=CODE or =exit, where NAME is a function of ACL or HCCL or an aclnn "
            f"operator, as aclrtMalloc:2=207001 or HcclAllReduce:3@1=exit"
        )
    return text
