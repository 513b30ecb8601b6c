"""The answer "no", with its reason and its advice."""

from __future__ import annotations

from dataclasses import dataclass

SOURCE_CANN = "source <CANN>/set_env.sh in this shell (/usr/local/Ascend/ascend-toolkit/set_env.sh by default)"
USE_CPU = "set DS_ACCELERATOR=cpu and TORCH_DEVICE_BACKEND_AUTOLOAD=0 to run on the CPU on purpose"


@dataclass(frozen=True)
class Lack:
    """Why something cannot be used, and what to do about it; neither ends in a full stop."""

    reason: str
    advice: str

    def __str__(self) -> str:
        return f"{self.reason}. What to do: {self.advice}."
