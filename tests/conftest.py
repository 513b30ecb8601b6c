"""Settings every test runs under: plain CPU, one thread, DeepSpeed quiet."""

from __future__ import annotations

import gc
import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))

import matrix
import pytest
from hypothesis import settings

import ds_npu

assert ds_npu.__version__
# The machines of CI are shared: how long an example takes says nothing.
settings.register_profile("ds_npu", deadline=None)
settings.load_profile("ds_npu")


def pytest_report_header() -> str:
    return matrix.header()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    matrix.mark_slow(items)
    if matrix.is_exhaustive() or any("[" in argument for argument in config.args):
        return
    left_out = matrix.left_out(items)
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


took: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    took[report.nodeid] = took.get(report.nodeid, 0) + report.duration


def pytest_sessionfinish() -> None:
    if matrix.is_exhaustive():
        matrix.record(took)


def pytest_collection_finish():
    """What is imported stays: collecting garbage takes less without it."""
    gc.collect()
    gc.freeze()
