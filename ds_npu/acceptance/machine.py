"""NPUs and software of this machine. The driver may hang, so another process asks it and prints the answer."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_npu import capability
from ds_npu.capability.releases import installed_version

CLONE = Path(__file__).resolve().parents[2]
"""The folder that holds the package: the clone, or site-packages."""
ANSWER_S = 300.0
"""Seconds within which the driver must name the NPUs."""
ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")


@dataclass(frozen=True)
class Npus:
    """Name and memory of each NPU.

    Where there is none, ``why_none`` says the reason and what to do.
    """

    names: list[str]
    memory_gib: list[float]
    why_none: str = ""

    @property
    def summary(self) -> str:
        """The NPUs in words: "8 NPUs (Ascend910B2, 64 GiB)"."""
        kinds = sorted({f"{name}, {size:g} GiB" for name, size in zip(self.names, self.memory_gib, strict=True)})
        return f"{len(self.names)} NPU{'' if len(self.names) == 1 else 's'} ({'; '.join(kinds)})"


def simulated() -> bool:
    """Whether the NPUs of this process are those of ``ds_npu sim``."""
    return "DS_NPU_SIM_DEVICES" in os.environ


def npus_here() -> Npus:
    """The NPUs of this machine; starts the Ascend runtime in another process, and waits for at most ANSWER_S."""
    command = [sys.executable, "-m", "ds_npu.acceptance.machine"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return Npus([], [], f"the driver did not answer within {ANSWER_S:g} s. What to do: run npu-smi info.")
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Npus([], [], f"asking torch_npu for NPUs ended with exit code {done.returncode}: {last}")
    return Npus(**json.loads(lines[-1]))


def _found() -> Npus:
    state = capability.torch_npu_state()
    if not state.usable:
        return Npus([], [], f"{state.reason}. What to do: {state.advice}.")
    torch_npu: Any = capability.try_import("torch_npu")[0]
    all_of_them = [torch_npu.npu.get_device_properties(index) for index in range(torch_npu.npu.device_count())]
    return Npus([each.name for each in all_of_them], [round(each.total_memory / 2**30, 1) for each in all_of_them])


def software_and_machine() -> dict[str, object]:
    """Versions, machine and settings, for the file: without addresses, paths or names of the machine."""
    found = capability.versions()
    return {
        "versions": asdict(found)
        | {name: installed_version(name) for name in ("ds_npu", "transformers")}
        | {"commit": _commit()},
        "versions that do not go together": capability.mismatches(found),
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "cores of this process": len(os.sched_getaffinity(0)),
            "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        },
        "npu-smi": _npu_smi(),
        "variables": {
            setting.name: without_names(setting.value)
            for setting in capability.hccl_environment()
            if setting.value is not None
        },
    }


def _commit() -> str | None:
    if not (CLONE / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(CLONE), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def _npu_smi() -> list[str]:
    if simulated() or shutil.which("npu-smi") is None:
        return []
    try:
        done = subprocess.run(["npu-smi", "info"], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return ["npu-smi info did not answer within 60 s"]
    return without_names(done.stdout.split("Process id")[0]).splitlines()


def without_names(text: str) -> str:
    """``text`` without the folders of Python, ds_npu and the user, the machine's name, and addresses."""
    folders = {"<python>": sys.prefix, "<ds_npu>": str(CLONE), "<here>": str(Path.cwd()), "<home>": str(Path.home())}
    for word, folder in folders.items():
        if len(folder) > 1:
            text = text.replace(folder, word)
    if len(socket.gethostname()) > 1:
        text = text.replace(socket.gethostname(), "<host>")
    return ADDRESS.sub("<address>", text)


if __name__ == "__main__":
    print(json.dumps(asdict(_found())))
