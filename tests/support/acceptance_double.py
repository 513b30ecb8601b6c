"""A group of the acceptance whose cases need no NPU and end in every way: the program of a world's ranks."""

from __future__ import annotations

import os
import sys
import time
import types

from ds_npu.acceptance import rank
from ds_npu.acceptance.case import Case, Check, Group, Measured, NotRunError, Scope

HANG_S = 600.0


def passes() -> Measured:
    return Measured([Check("error", 1.0, 2.0), Check("other", 0.0, 0.0)], series={"loss": [1 / 3, 2.0]})


def worse_on_rank_1() -> Measured:
    return Measured([Check("error", 3.0 if os.environ["RANK"] == "1" else 0.5, 2.0)])


def no_number() -> Measured:
    return Measured([Check("error", float("nan"), 2.0), Check("other", 1.0, 2.0)])


def raises() -> Measured:
    print("printed before the error")
    raise RuntimeError("the device is not well")


def ends() -> Measured:
    os._exit(7)


def hangs() -> Measured:
    time.sleep(HANG_S)
    return Measured()


def cannot() -> Measured:
    raise NotRunError("no such kernel here")


WAYS = {each.__name__: each for each in (passes, worse_on_rank_1, no_number, raises, ends, hangs, cannot)}


def double_cases(scope: Scope) -> list[Case]:
    """Each way of ending, on two ranks; the hang has little time."""
    return [Case(name, 2, timeout_s=1.0 if name == "hangs" else 60.0) for name in WAYS]


GROUP = Group("double", "acceptance_double", "to be tested", "none", "nothing", double_cases)


if __name__ == "__main__":
    rank.npu_module = lambda: types.SimpleNamespace(set_device=lambda _: None, synchronize=lambda: None)
    sys.exit(rank.run_cases(double_cases, lambda case, job: WAYS[case.name](), distributed=False))
