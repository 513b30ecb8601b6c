"""Keys that save memory on simulated NPUs whose streams run in odd orders: to the bit what is computed without."""

from __future__ import annotations

import sys

import pytest
import simulated


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=0)
@pytest.mark.parametrize(("axis", "seed"), [("pipeline", 1), ("context", 2), ("expert", 3), ("context", 4)])
def test_all_keys_at_once_on_an_axis(axis, seed):
    test = f"tests/npu/test_memory_axes_npu.py::test_all_keys_at_once_on_an_axis[{axis}]"
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test)
    done = simulated.sim("--devices", "2", "--chaos", str(seed), "--", *command, timeout=900)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout, done.stdout
