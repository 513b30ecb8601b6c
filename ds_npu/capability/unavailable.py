"""The answer "no", with its reason and its advice."""

from __future__ import annotations

import os
from dataclasses import dataclass

SOURCE_CANN = "source <CANN>/set_env.sh in this shell (/usr/local/Ascend/ascend-toolkit/set_env.sh by default)"
CPU_VARIABLES = {"DS_ACCELERATOR": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Variables with which neither DeepSpeed nor torch imports torch_npu by itself."""


def use_cpu() -> str:
    """How to run on the CPU on purpose, as far as it is not done yet."""
    missing = [f"{name}={value}" for name, value in CPU_VARIABLES.items() if os.environ.get(name) != value]
    if missing:
        return f"set {' and '.join(missing)} to run on the CPU on purpose"
    return (
        "uninstall torch_npu to run on the CPU on purpose: DS_ACCELERATOR=cpu and TORCH_DEVICE_BACKEND_AUTOLOAD=0 are "
        "set and keep DeepSpeed and torch from importing it, but the script or a library imports it by itself; for one "
        "that only looks whether there is a torch_npu (transformers), unset TORCH_DEVICE_BACKEND_AUTOLOAD"
    )


@dataclass(frozen=True)
class Unavailable:
    """Why something cannot be used, and what to do about it; neither ends in a full stop."""

    reason: str
    advice: str

    def __str__(self) -> str:
        return f"{self.reason}. What to do: {self.advice}."
