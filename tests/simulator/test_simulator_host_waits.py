"""How often the host waits for the device in a training step, counted in the record of simulated NPUs."""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import pytest
import simulated

TRAINING = """
import os, sys
import deepspeed, torch
import torch.distributed as dist
from torch import nn

torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
deepspeed.init_distributed("hccl")
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).bfloat16()
config = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1,
    "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "zero_optimization": {"stage": int(sys.argv[1])}, "ds_npu": {},
}
groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "weight_decay": 0.0}]
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
x = torch.randn(4, 16, dtype=torch.bfloat16, device="npu")
for step in range(4):
    torch.linspace(0, 1, 7, device="npu")  # the mark of a step
    for _ in range(2):
        engine.backward(engine(x).float().square().mean())
        engine.step()
torch.linspace(0, 1, 7, device="npu")
dist.destroy_process_group()
"""
MARK, WAIT = "aclnnLinspace", "host wait"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_waits_once(tmp_path, stage):
    script, traces = tmp_path / "training.py", tmp_path / "traces"
    script.write_text(TRAINING)
    traces.mkdir()
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), str(stage))
    done = simulated.sim("--devices", "2", "--trace", str(traces), "--", *command, PYTHONPATH=str(simulated.ROOT))
    assert done.returncode == 0, done.stderr
    found = []
    for path in traces.glob("*.json"):
        lines = [json.loads(line.rstrip(",")) for line in path.read_text().splitlines()[1:]]
        names = [line["name"] for line in sorted(lines, key=lambda line: line["args"]["place"])]
        steps = [index for index, name in enumerate(names) if name == MARK]
        if steps:
            assert len(steps) == 5 and sum(each.startswith("Hccl") for each in names[steps[1] : steps[2]]) >= 3
            found.append([names[a:b].count(WAIT) for a, b in pairwise(steps)])
    # In the first step an operator is tried, and memory is allocated.
    assert len(found) == 2 and all(each[1:] == [1, 1, 1] for each in found), found
