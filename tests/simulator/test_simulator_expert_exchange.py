"""Products of experts fused with an all-to-all, on a simulated A3 with delays, and what an A2 says of them."""

from __future__ import annotations

import sys

import pytest
import simulated

pytestmark = pytest.mark.slow  # the libraries are compiled first, if they are not yet


@pytest.mark.parametrize("seed", ["1"])
def test_the_kernels_of_an_a3(seed):
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/npu/test_expert_exchange.py")
    done = simulated.sim("--soc", "910_9391", "--chaos", seed, "--", *command, timeout=900)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout, done.stdout


def test_an_a2_has_none():
    script = "from ds_npu.ops import expert_exchange as each; print(each.why_not_fused())"
    done = simulated.sim("--soc", "910B2", "--", sys.executable, "-c", script, timeout=120)
    assert "CANN has them for Atlas A3 (Ascend910_93*), and this is Ascend910B2" in done.stdout, done.stdout
