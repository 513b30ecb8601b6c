"""``ds_npu.deterministic``: kernels and sums over ranks that give the same bits each time.

torch then takes the deterministic form of its operators, and raises an error that names an operator without one.
torch_npu tells CANN's operators (aclrtSetSysParamOpt) and HCCL's reductions (HcclSetConfig) with the next operator
(SetDeterministicOption in torch_npu's OpCommand.cpp); HCCL ignores that where HCCL_DETERMINISTIC is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import deterministic

from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change

VARIABLE = "HCCL_DETERMINISTIC"


def _unmet(value: bool) -> list[str]:
    found = os.environ.get(VARIABLE, "")
    if value and found.lower() == "false":
        return [f"no value while {VARIABLE}={found} is in the environment, which goes before it: unset the variable"]
    return []


def _parts(value: bool, build: Build) -> Iterable[Change]:
    if value:
        yield Change("provides", "deterministic kernels", "the same bits in each run, of the whole process", _switch_on)


def _switch_on() -> None:
    torch.use_deterministic_algorithms(True)
    # Else a kernel fills each new tensor with NaN, which changes nothing of a run that reads no such memory.
    options: Any = deterministic
    options.fill_uninitialized_memory = False


DETERMINISTIC: Feature[bool] = Feature("deterministic", parts=_parts, unmet=_unmet)
