"""A Trainer whose config saves memory lives as one whose config does not, to the bit; also in pipeline stages."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tiny_models
import torch
from ranks import run_on_ranks
from trainer_lives import assert_close, ds_config, live, told
from trainer_runs import completed, same, weights_in

pytestmark = pytest.mark.slow
DYING = Path(tiny_models.__file__).with_name("dying_trainer.py")

LIVES = ["bf16", "bf16, resumed"]
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "pipeline": (2, {"pipeline": 2}),
    "tensor": (2, {"tensor": 2}),
    "data": (2, {}),
    "context": (2, {"context": 2}),
    "pipeline, tensor": (4, {"pipeline": 2, "tensor": 2}),
}
CASES = [("pipeline", 1), ("tensor", 2), ("data", 3), ("context", 1), ("pipeline, tensor", 1), ("tensor", 3)]
"""Layouts and stages of ZeRO."""

KEYS = {"swap": {"activations": True}, "optimizer_memory": {"share_fp32": True, "swap": True}}


def lives(folder: str, start: str, stage: int, parallel: dict[str, object]) -> None:
    """The body of a rank: the same lives without the keys and with them."""
    picture = f"{folder}/memory.svg"
    for name, more in (("without", {}), ("with", KEYS | {"memory_report": picture})):
        config = ds_config(stage, parallel)
        config |= {"bf16": {"enabled": "auto"}}
        config["ds_npu"] |= more
        live(LIVES, f"{folder}/{name}", start, config)
        assert Path(picture).exists() == bool(more)


@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(("layout", "stage"), CASES)
def test_a_whole_life(layout: str, stage: int, tmp_path: Path):
    """Trains, evaluates, rotates checkpoints, loads the best one, predicts, saves, and resumes within an epoch."""
    ranks, parallel = LAYOUTS[layout]
    start = str(tmp_path / "start")
    tiny_models.tiny("llama", torch.float32).save_pretrained(start)
    run_on_ranks(ranks, lives, str(tmp_path), start, stage, parallel)
    plain, found = (told(tmp_path / name, ranks) for name in ("without", "with"))
    for rank, each in enumerate(found):
        assert_close(each, plain[rank], 0.0, f"rank {rank}")
        whole, resumed = (each[title]["losses"] for title in LIVES)
        assert resumed == whole[4:] and len(resumed) > 4
    for saved in ("bf16", "bf16/checkpoint-2", "bf16, resumed/checkpoint-8"):
        assert same(weights_in(tmp_path / "with" / saved), weights_in(tmp_path / "without" / saved)), saved


@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(("layout", "how"), [("pipeline", "killed"), ("pipeline", "raises"), ("tensor", "killed")])
def test_a_rank_that_dies_in_a_step(layout: str, how: str, tmp_path: Path):
    """The run ends, with one error, or none where a rank was killed, and its last words are not the transport's."""
    ranks, parallel = LAYOUTS[layout]
    section = {"parallel": parallel, **KEYS, "memory_report": True}
    begun = time.monotonic()
    done = completed(tmp_path, ranks, section, {"bf16": True, "max_steps": 4}, 1, (str(DYING), how))
    assert time.monotonic() - begun < 150
    text = done.stderr
    assert done.returncode == 1, text
    if how == "raises":
        assert text.count("in die\n") == 1 and "since rank 1 failed in 1F0 (stage 1, micro-batch 0)" in text, text
        assert "KeyError: 'no such column'" in "\n".join(text.splitlines()[-12:]), text
    else:
        assert "Signal 9 (SIGKILL)" in "\n".join(text.splitlines()[-12:]), text
        assert "third_party/gloo" not in text or "[ds_npu] ERROR: rank 0 of 2" in text.rpartition("third_party/gloo")[2]
