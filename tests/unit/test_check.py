"""The ``ds_npu`` command, as a user runs it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_npu.config.schema import reference

ROOT = Path(__file__).parents[2]
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "zero_optimization": {"stage": 1},
    "ds_npu": {"parallel": {"tensor": 2, "context": 2, "pipeline": 2, "expert": 4}},
}

COMMANDS = "there are accept, calibrate, check, compare, convert, inspect, predict, profile, replay, schema, sim"


def ds_npu(*arguments):
    # -E would drop PYTHONPATH; the command must also work where nothing but the checkout is there.
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ds_npu.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)


@pytest.fixture
def write(tmp_path):
    def write(config):
        path = tmp_path / "ds_config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return path

    return write


def test_the_layout_of_a_right_config(write):
    done = ds_npu("check", write(CONFIG), "--world-size", 16, "--sequence-length", 4096)
    assert (done.returncode, done.stderr) == (0, "")
    lines = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert lines >= {
        "pipeline (pp) 2 8 [0 8] [1 9] [2 10] [3 11] [4 12] [5 13] [6 14] [7 15]",
        "data (dp) 2 8 [0 4] [1 5] [2 6] [3 7] [8 12] [9 13] [10 14] [11 15]",
        "context (cp) 2 8 [0 2] [1 3] [4 6] [5 7] [8 10] [9 11] [12 14] [13 15]",
        "tensor (tp) 2 8 [0 1] [2 3] [4 5] [6 7] [8 9] [10 11] [12 13] [14 15]",
        "expert (ep) 4 4 [0 1 2 3] [4 5 6 7] [8 9 10 11] [12 13 14 15]",
        "expert tensor (etp) 1 -",
        "pp 1 dp 0 8 9 | 10 11",
        # The widest traffic stays inside: of the axes, pipeline ranks send least often.
        "Groups on nodes of A2, 8 ranks each: data, context, tensor, expert data, expert each within a node; "
        "pipeline over 2",
        "ZeRO 1 shards optimizer states over data * context, 4 ranks: [0 2 4 6] [1 3 5 7] [8 10 12 14] [9 11 13 15]",
        "Batch: 4 micro * 8 accumulation * 2 data parallel = 64 samples a step = 262,144 tokens",
    }
    assert "ds_npu.parallel.tensor is" not in done.stdout


@pytest.mark.parametrize("world_size", [16, 16384])
def test_any_world_takes_less_than_five_seconds(write, world_size):
    path = write(CONFIG)
    start = time.monotonic()
    done = ds_npu("check", path, "--world-size", world_size)
    assert time.monotonic() - start < 5
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) < 60 and str(world_size - 1) in done.stdout


def test_every_mistake_is_on_stderr(write):
    config = CONFIG | {"train_batch_size": 63, "ds_npu": {"parallel": {"tensor": 3, "tensr": 2, "expert": "4"}}}
    done = ds_npu("check", write(config), "--world-size", 16)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[0] == "4 mistakes in the DeepSpeed config:"
    for path in (
        "ds_npu.parallel.tensor: found 3;",
        "ds_npu.parallel.tensr:",
        "ds_npu.parallel.expert:",
        "train_batch_size:",
    ):
        assert f"\n  {path}" in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n "a": 1,\n "b": [1,\n }', ', line 4, column 2: found "}"; JSON or Hjson'),
        ('{"a": {"b": 1, "b": 2}}', "  a.b: found [1, 2]; one value"),
        ("[1]", "ds_config.json: found [1]; an object with DeepSpeed's keys"),
    ],
)
def test_a_file_that_is_no_config(write, text, said):
    done = ds_npu("check", write(text))
    assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 2


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        done = ds_npu("check", path)
        assert done.returncode == 1 and f"{path}: found" in done.stderr and "Traceback" not in done.stderr


def test_hjson_is_read_as_deepspeed_reads_it(write):
    assert ds_npu("check", write("{train_batch_size: 8 # samples\n ds_npu: {}}"), "--world-size", 2).returncode == 0


@pytest.mark.parametrize("world_size", ["0", "-1", "two", "1.5", ""])
def test_a_world_size_that_is_none_is_wrong_usage(write, world_size):
    done = ds_npu("check", write(CONFIG), f"--world-size={world_size}")
    assert done.returncode == 2 and "an integer >= 1" in done.stderr


def test_wrong_usage():
    for arguments in ([], ["chekc"], ["check"], ["schema", "extra"]):
        assert ds_npu(*arguments).returncode == 2


def test_without_a_world_size(write):
    done = ds_npu("check", write(CONFIG))
    assert done.returncode == 0 and "The smallest world that fits has 8 ranks." in done.stdout


def test_without_a_section(write):
    done = ds_npu("check", write({"ds-npu": {"parallel": {"tensor": 2}}}), "--world-size", 2)
    assert done.returncode == 0
    assert "no ds_npu section" in done.stdout and "'ds-npu' is ignored" in done.stdout


def test_sizes_that_the_trainer_fills_in(write):
    sizes = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    done = ds_npu("check", write(CONFIG | sizes), "--world-size", 16)
    assert done.returncode == 0 and "? micro * 8 accumulation * 2 data parallel = ? samples" in done.stdout


def test_schema():
    schema = json.loads(ds_npu("schema").stdout)
    assert schema["properties"]["ds_npu"]["additionalProperties"] is False
    section = json.loads(ds_npu("schema", "--section").stdout)
    assert section.pop("$schema") == schema["$schema"] and section == schema["properties"]["ds_npu"]
    assert ds_npu("schema", "--markdown").stdout == reference()


def test_neither_torch_nor_deepspeed_is_needed():
    # `import ds_npu` itself may load more; what the command adds to it may not.
    code = "import sys, ds_npu; before = set(sys.modules); import ds_npu.cli.main; print(set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"torch", "deepspeed", "torch_npu"} & {name.strip("{}' \n") for name in done.stdout.split(",")}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "print the layout a config means"),
        (("--version",), 0, f"ds_npu 0.1.0 (torch {importlib.metadata.version('torch')}, torch_npu "),
        (
            ("chek",),
            2,
            f"there is no command \"chek\", did you mean 'check'?; {COMMANDS}",
        ),
        (("\x1b[2J",), 2, f'there is no command "\\u001b[2J"; {COMMANDS}'),
    ],
)
def test_without_a_command(arguments, code, said):
    found = ds_npu(*arguments)
    assert found.returncode == code and said in found.stdout + found.stderr, found
