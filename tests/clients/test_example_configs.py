"""Every DeepSpeed config under examples/configs is one that ``ds_npu check`` accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_npu.config.check import check

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "configs"
CONFIGS = [path for path in FOLDER.glob("*.json") if "optimizer" in json.loads(path.read_text())]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_it_has_no_mistake(path, world_size):
    config = {"ds_npu": {}, **json.loads(path.read_text())}
    a_step = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * world_size
    assert check(config, world_size).batch.train == a_step


def test_one_of_them_shows_the_section():
    assert len(CONFIGS) >= 5 and any("ds_npu" in json.loads(path.read_text()) for path in CONFIGS)
