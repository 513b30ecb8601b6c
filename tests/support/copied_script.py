"""A script that trains with copies in peers' memory: FOLDER, victims (ranks, as 1,2), the step they die in, and steps.

It begins where ``latest`` in FOLDER says, and saves there itself before its third step, at its first start. Behind the
section stands the signal that victims get, and ``slow`` where the disk is slow.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import deepspeed
import tiny_models
import torch

import ds_npu  # noqa: F401  (where it is not installed)
from ds_npu.checkpoint.digests import DigestedWriter

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
GIVEN = [each for each in sys.argv[1:] if not each.startswith("--")]
"""Without what DeepSpeed's launcher adds."""
FOLDER, VICTIMS, DEATH, STEPS, SECTION = GIVEN[0], GIVEN[1].split(","), *map(int, GIVEN[2:4]), GIVEN[4]
SIGNAL = getattr(signal, GIVEN[5] if len(GIVEN) > 5 else "SIGKILL")
EVERY = 4
CONFIG = {
    "train_batch_size": 4,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2, "torch_adam": True}},
    "ds_npu": {"checkpoint": {"peer_copies": EVERY, "peer_folder": FOLDER}, **json.loads(SECTION)},
}


def slow_disk() -> None:
    """Let each write to a file take a while."""
    write = DigestedWriter.write

    def slowly(self, data):
        time.sleep(0.02)
        return write(self, data)

    DigestedWriter.write = slowly


def engine_of(config: dict):
    model = tiny_models.tiny("llama", torch.float32)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def main() -> None:
    deepspeed.init_distributed()
    if "slow" in GIVEN:
        slow_disk()
    engine = engine_of(CONFIG)
    is_first = not Path(FOLDER, "latest").exists()
    if not is_first:
        engine.load_checkpoint(FOLDER)
        print(f"begins at {engine.global_steps}", flush=True)
    train(engine, is_first)
    if not is_first:
        section = {key: each for key, each in CONFIG["ds_npu"].items() if key != "checkpoint"}
        uninterrupted = engine_of(CONFIG | {"ds_npu": section})
        train(uninterrupted, False)
        print(f"the same is {digest_of(engine) == digest_of(uninterrupted)}", flush=True)
    engine.destroy()


def train(engine, is_first: bool) -> None:
    rank, size = engine.topology.rank("dp"), engine.topology.size("dp")
    while engine.global_steps < STEPS:
        step = engine.global_steps
        if step == 2 and is_first:
            engine.save_checkpoint(FOLDER)
        if step == DEATH and os.environ["RANK"] in VICTIMS:
            os.kill(os.getpid(), SIGNAL)
        ids = tiny_models.tokens(4 * (step + 1), 9)[4 * step :][4 // size * rank :][: 4 // size].to(engine.device)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def digest_of(engine) -> str:
    weights = engine.whole_state_dict()
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in weights.values())).hexdigest()


if __name__ == "__main__":
    main()
