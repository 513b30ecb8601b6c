"""``ds_npu sim --races``: races of small programs, waits left out of ds_npu's paths, and runs without a race."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import simulated
from test_simulator_dry import CASES, config

slow = pytest.mark.slow  # the libraries are compiled first, if they are not yet

BEGIN = """
import torch, torch_npu
torch.npu.set_device(0)
side, main = torch.npu.Stream(), torch.npu.current_stream()
x, m = torch.ones(1 << 16, device="npu"), torch.ones(256, 256, device="npu")
torch.npu.synchronize()
def doubled(y):
    with torch.npu.stream(side):
        return y.mul_(2)
"""
SMALL = {
    "a wait is missing": ("x.add_(1); doubled(x)", ("aclnnInplaceMuls", "aclnnInplaceAdds")),
    "the wait is there": ("x.add_(1); side.wait_stream(main); doubled(x); main.wait_stream(side); x.add_(1)", None),
    "record_stream is missing": (
        "z = x + 1; side.wait_stream(main)\nwith torch.npu.stream(side): w = z * 2\n"
        "del z; torch.zeros(1 << 16).npu() + x",
        ("aclrtMemcpy", "aclnnMuls"),
    ),
    "record_stream is there": (
        "z = x + 1; side.wait_stream(main)\nwith torch.npu.stream(side): w = z * 2\n"
        "z.record_stream(side); del z; torch.zeros(1 << 16).npu() + x",
        None,
    ),
    "other columns": ("doubled(m[:, ::2]); m[:, 1::2].add_(1)", None),
    "the same columns": ("doubled(m[:, ::2]); m[:, ::3].add_(1)", ("aclnnInplaceAdds", "aclnnInplaceMuls")),
    "the host has asked": ("x.add_(1); e = main.record_event()\nwhile not e.query(): pass\ndoubled(x)", None),
}


@slow
@pytest.mark.parametrize("name", SMALL)
def test_a_small_program(name):
    code, race = SMALL[name]
    done = simulated.python(BEGIN + code + "\ntorch.npu.synchronize()\n", "--devices", "1", "--races")
    said = done.stderr.splitlines()
    if race is None:
        assert done.returncode == 0 and said[-1].startswith("ds_npu sim: no race among"), done.stderr
        return
    second, first = race
    (line,) = (each for each in said if each.startswith("ds_npu sim: race: "))
    assert done.returncode == 1
    assert line.startswith(f"ds_npu sim: race: {second} (") and f" bytes that {first} (" in line
    assert any(each.startswith(f"  {first}: in ") and "<string>:" in each for each in said)


def ranks(script: str, folder: Path, cases: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    path = os.pathsep.join((str(simulated.ROOT), str(simulated.ROOT / "tests" / "support")))
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", f"tests/npu/{script}.py")
    return simulated.sim(
        "--devices", "2", "--races", "--", *command, *arguments, str(file), timeout=900, PYTHONPATH=path
    )


# DeepSpeed's throughput timer waits for the device before most steps; it need not.
UNSYNCHRONIZED = {"timers": {"throughput": {"enabled": True, "synchronized": False}}}


@slow
def test_training_over_every_axis_and_stage_of_zero_is_free_of_races(tmp_path):
    done = ranks("training_steps", tmp_path, CASES)
    assert done.returncode == 0, done.stderr[-3000:]
    found = done.stderr.strip().splitlines()[-1]
    assert found.startswith("ds_npu sim: no race among")
    assert int(found.split()[5].replace(",", "")) > 50_000


@slow
def test_a_weight_that_forward_has_freed_is_not_used_again_before_its_event(tmp_path):
    # The next to ask for memory is a thread of autograd that has called no operator before.
    done = ranks("training_steps", tmp_path, [["llama", config(3) | UNSYNCHRONIZED | {"ds_npu": {}}]])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.strip().splitlines()[-1].startswith("ds_npu sim: no race among")


SWAP = {"swap": {"activations": True}}
PLAIN_1, PLAIN_3 = (config(stage) | UNSYNCHRONIZED | {"ds_npu": {}} for stage in (1, 3))
OWN_GATHERS = {"zero_optimization": {**PLAIN_3["zero_optimization"], "stage3_module_granularity_threshold": 1}}
PLANTS = [
    ("stage_3_corrections:stepped", PLAIN_3 | OWN_GATHERS),
    ("stage_3_corrections:wait", PLAIN_3),
    ("gather_messages:__init__", PLAIN_3),
    ("scattered_gradients:_send", PLAIN_3),
    ("scattered_gradients:_keep", PLAIN_3),
    ("gather_messages:arrive", PLAIN_3),
    ("gather_messages:_copy_out", PLAIN_3),
    ("arrival:arrive", PLAIN_1),
    ("pending:wait", PLAIN_1),
    ("pending:wait", config(1, parallel={"tensor": 2, "sequence_parallel": True}, tensor_overlap="pipelined")),
    ("copy_streams:_wait_for_inputs", config(0, **SWAP)),
    ("copy_streams:wait", config(0, **SWAP)),
    ("copy_streams:copy_back", config(0, **SWAP)),
    ("copy_streams:_encode_and_copy", config(0, swap={"activations": True, "compress": True})),
    ("chunked_step:send", config(0, optimizer_memory={"swap": True})),
    ("chunked_step:receive", config(0, optimizer_memory={"swap": True})),
]


@slow
@pytest.mark.parametrize(("plant", "made"), PLANTS, ids=[plant for plant, _ in PLANTS])
def test_a_wait_that_is_left_out_is_found(tmp_path, plant, made):
    made = made | {"train_micro_batch_size_per_gpu": 512}
    done = ranks("planted_races", tmp_path, [["llama", made]], plant)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "ds_npu sim: race: " in done.stderr and "nothing orders them" in done.stderr
    assert "ds_npu/" in done.stderr.split("ds_npu sim: race: ")[1]


@slow
def test_a_command_that_fails_is_not_said_to_be_without_races():
    done = simulated.python("import torch; torch.ones(1).npu(); exit(3)", "--devices", "1", "--races")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("The command ended with exit code 3; ")


@slow
def test_races_are_not_looked_for_in_runs_that_are_changed():
    for option in (("--chaos", "1"), ("--fault", "aclnnAdd=1")):
        done = simulated.python("pass", "--races", *option)
        assert done.returncode == 2 and "without --chaos and --fault" in done.stderr
