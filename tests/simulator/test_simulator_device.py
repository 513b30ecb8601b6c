"""Scripts that set no device, launched as their users launch them, on simulated NPUs: losses are those of the CPU."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import convolving_models
import gradient_rule as rule
import pytest
import simulated
import tiny_models
import torch
from torch import nn

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "npu" / "plain_script.py"
LR, CLIP, STEPS = 0.5, 1.0, 2
TUTORIAL = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": CLIP,
    "optimizer": {"type": "SGD", "params": {"lr": LR}},
    "zero_allow_untested_optimizer": True,
}
ROADS = [
    ("tutorial", 1, {"tensor": 2}),
    ("tutorial", 1, {"context": 2}),
    ("zero_init", 3, {"context": 2}),
    ("from_pretrained", 1, {"tensor": 2}),
    ("pipeline", 1, {"pipeline": 2}),
    ("convolving", 2, {}),
]


def descended(model: nn.Module, loss_of) -> list[float]:
    """The losses of clipped gradient descent in one process on the CPU."""
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model)
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        with torch.no_grad():
            for weight in (each for each in model.parameters() if each.grad is not None):
                weight -= LR * weight.grad
        losses.append(loss.item())
    return losses


def of_family(family: str) -> list[float]:
    model, batch = convolving_models.made(family)
    return descended(model, lambda each: each(**batch).loss)


@functools.cache
def expected(road: str) -> list[float]:
    if road == "pipeline":
        tokens = rule.samples(rule.MICRO)
        return descended(
            nn.Sequential(*rule.layers()), lambda model: rule.token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        )
    if road == "convolving":
        return [loss for family in convolving_models.FAMILIES for loss in of_family(family)]
    batch = tiny_models.tokens(2, 16)
    return descended(tiny_models.tiny("llama", torch.float32), lambda model: model(input_ids=batch, labels=batch).loss)


@pytest.mark.parametrize(("road", "stage", "degrees"), ROADS, ids=str)
def test_a_script_that_sets_no_device(tmp_path, road, stage, degrees):
    tiny_models.tiny("llama", torch.float32).save_pretrained(tmp_path / "model")
    config = tmp_path / "config.json"
    section = {"ds_npu": {"parallel": degrees}} if degrees else {}
    config.write_text(json.dumps(TUTORIAL | {"zero_optimization": {"stage": stage}} | section))
    launched = ["deepspeed", "--num_gpus", "2", str(SCRIPT), road, str(tmp_path)]
    done = simulated.sim(
        "--devices",
        "2",
        "--",
        *launched,
        "--deepspeed",
        "--deepspeed_config",
        str(config),
        timeout=400,
        # The launched processes import this checkout, whichever is installed.
        PYTHONPATH=f"{SCRIPT.parents[1] / 'support'}:{SCRIPT.parents[2]}",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "DeepSpeed trains on" not in done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"said by {rank}.json").read_text())
        assert found["npus"] == [rank]
        assert found["losses"] == pytest.approx(expected(road), rel=1e-4)
