"""Saves behind training on (simulated) NPUs: through pinned memory, with a step in between, as saves that block."""

from __future__ import annotations

import background_lives as lives
import layout_lives
import torch
from host_waits import HostWaits
from ranks import run_on_ranks

OWN = {"backend": "hccl", "sets_device": False}


def test_a_save_behind_training_holds_what_one_that_blocks_holds(tmp_path):
    run_on_ranks(2, lives.life, str(tmp_path), [0, 2], **OWN)


def no_wait(folder: str) -> None:
    """A save waits for none of its copies, those of partitions in buckets among them."""
    # DeepSpeed compares the tags of all ranks on the device, character by character.
    alike = {"checkpoint": {"tag_validation": "Ignore"}}
    engine = layout_lives.engine_of("llama", 1, {"checkpoint": {"asynchronous": True}}, torch.float32, **alike)
    for number in range(2):
        lives.step(engine, number)
        with HostWaits() as waits:
            engine.save_checkpoint(folder)
        engine.finish_saving()
        assert not waits.found and len(waits.awaited_later) > 2, (number, waits.found, waits.awaited_later)


def test_a_save_waits_for_no_copy(tmp_path):
    run_on_ranks(2, no_wait, str(tmp_path), **OWN)
