"""Matrix products with collectives on NPUs whose streams are delayed at random: what is not waited for is not there."""

from __future__ import annotations

import sys

import pytest
import simulated

pytestmark = pytest.mark.slow  # the libraries are compiled first, if they are not yet


@pytest.mark.parametrize("seed", ["1", "2"])
def test_nothing_is_read_before_it_is_there(seed):
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/npu/test_tensor_matmul.py")
    done = simulated.sim("--chaos", seed, "--", *command, timeout=300)
    assert done.returncode == 0, done.stdout
    assert f"chaos {seed}" in done.stderr
