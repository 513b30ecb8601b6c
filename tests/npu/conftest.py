"""What every test of this folder needs."""

import os

os.environ["DS_ACCELERATOR"] = "npu"  # the conftest.py above says cpu

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("npu", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("npu")


@pytest.fixture(autouse=True, scope="session")
def an_npu():
    if not torch.npu.is_available():
        pytest.fail("no NPU: run these as ds_npu sim -- python -m pytest tests/npu")
