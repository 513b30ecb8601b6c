"""DeepSpeed's ZeRO on simulated NPUs: the losses of the CPU with gloo, whatever the order of the streams."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest
import simulated
import zero_losses

STEPS = 3
# A loss is a mean over tokens, so its error is below that of the logits: a unit in the last place of their type.
ALLOWED = {"fp32": 2**-20, "bf16": 2**-9}


def program(ranks: int, settings: tuple[str, ...]) -> list[str]:
    return [sys.executable, zero_losses.__file__, str(ranks), str(STEPS), *settings]


@functools.cache
def on_cpu(ranks: int) -> dict[str, list[float]]:
    environ = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(program(ranks, ()), env=environ, capture_output=True, text=True, timeout=300, check=False)
    return json.loads(simulated.printed(done)[-1])


@functools.cache
def on_npus(ranks: int, settings: tuple[str, ...] = (), seed: int | None = None) -> dict[str, list[float]]:
    chaos = () if seed is None else ("--chaos", str(seed))
    done = simulated.sim("--devices", str(ranks), *chaos, "--", *program(ranks, settings), timeout=300)
    return json.loads(simulated.printed(done)[-1])


@pytest.mark.matrix(corners=1, drawn=0)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_are_those_of_the_cpu(ranks):
    expected = on_cpu(ranks)
    found = on_npus(ranks)
    assert list(found) == list(expected) == list(zero_losses.SETTINGS)
    for setting, losses in expected.items():
        allowed = ALLOWED[setting.split("-")[1]]
        assert found[setting] == pytest.approx(losses, rel=allowed, abs=0), setting
        assert losses[-1] < losses[0] - 0.2, setting


@pytest.mark.matrix(corners=0, drawn=1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
def test_losses_are_the_same_for_every_order_of_the_streams(seed):
    """Each seed has four of the settings, on 2 or 4 ranks, so that each setting meets five seeds."""
    ranks = 2 if seed % 2 else 4
    settings = zero_losses.SETTINGS[seed // 2 % 4 :: 4]
    expected = on_npus(ranks)
    assert on_npus(ranks, settings, seed) == {setting: expected[setting] for setting in settings}
